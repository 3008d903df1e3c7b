"""Messages arrive as they were sent or not at all, whatever comes: over sockets, over asyncio
streams and from files.
"""

import asyncio
import json
import socket
import time
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.messaging import framing
from rljax.messaging.framing import ConnectionClosed, FramingError, Limits, Message

MESSAGE = Message(
    "call",
    {"method": "score", "number": 7, "path": None},
    {
        "token_ids": np.arange(12, dtype=np.int32).reshape(3, 4),
        "loss_mask": np.array([[True, False]]),
        "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "empty": np.zeros((0, 5), np.float32),
        "scalar": np.array(2.5),
        "piece": np.frombuffer(b"\x00\xff", np.uint8),
        "counts": np.array([1 << 40]),
    },
)
SMALL = Limits(header=4096, body=1 << 20)


def encoded(message: Message) -> bytearray:
    return bytearray(b"".join(framing.encode(message)))


def over_a_socket(data: bytes, limits: Limits = framing.PROVED) -> Message:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        return framing.receive(theirs, limits)


def over_a_stream(data: bytes, limits: Limits = framing.PROVED) -> Message:
    async def read():
        reader = asyncio.StreamReader()
        reader.feed_data(bytes(data))
        reader.feed_eof()
        return await framing.read(reader, limits)

    return asyncio.run(read())


def from_a_file(data: bytes, limits: Limits = framing.PROVED) -> Message:
    for message, end in framing.scan(bytes(data)):
        assert end == len(data)
        return message
    raise ConnectionClosed("no whole message")


READERS = [over_a_socket, over_a_stream, from_a_file]
readers = pytest.mark.parametrize("read", READERS)


@readers
def test_a_message_comes_out_as_it_went_in(read):
    got = read(encoded(MESSAGE))
    assert (got.kind, got.fields) == (MESSAGE.kind, MESSAGE.fields)
    assert got.arrays.keys() == MESSAGE.arrays.keys()
    for name, array in MESSAGE.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], array)
        assert got.arrays[name].dtype == array.dtype


@given(st.sampled_from(READERS), st.data())
def test_a_changed_byte_is_never_taken_for_a_message(read, data):
    whole = encoded(MESSAGE)
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FramingError):
        read(whole, SMALL)


@given(st.sampled_from(READERS), st.integers(0, len(encoded(MESSAGE)) - 1))
def test_a_torn_message_is_a_closed_connection(read, length):
    with pytest.raises(ConnectionClosed):
        read(encoded(MESSAGE)[:length])


@given(st.sampled_from(READERS), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(read, data):
    with pytest.raises(FramingError):
        read(data, SMALL)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(sorted(framing.DTYPES)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
DESCRIBED = st.lists(
    st.tuples(st.text(max_size=2) | JSON, st.sampled_from(sorted(framing.DTYPES)) | JSON, st.lists(st.integers(-2, 4)) | JSON),
    max_size=3,
)


def with_header(header, body: bytes) -> bytes:
    """A message whose header may say anything, under a checksum that is right."""
    text = json.dumps(header).encode()
    prefix = (framing.MAGIC, framing.VERSION, len(text), len(body))
    checksum = zlib.crc32(framing.PREFIX.pack(*prefix, 0) + text + body)
    return framing.PREFIX.pack(*prefix, checksum) + text + body


@given(
    st.fixed_dictionaries({"kind": JSON | st.text(), "fields": JSON, "arrays": DESCRIBED | JSON}) | JSON, st.binary(max_size=40)
)
def test_a_header_that_lies_makes_no_array_of_other_bytes(header, body):
    try:
        got = over_a_socket(with_header(header, body))
    except FramingError:
        return
    assert b"".join(array.tobytes() for array in got.arrays.values()) == body
    for array in got.arrays.values():
        assert array.dtype.str in framing.DTYPES and (array.dtype != bool or array.view(np.uint8).max(initial=0) <= 1)


@pytest.mark.parametrize(
    "arrays",
    [
        [["x", "<i4", [-1]]],
        [["x", "<i4", [3]]],
        [["x", "<i4", [1]]],  # less than there is
        [["x", "<i4", [2, -1]]],
        [["x", "<i4", [True, 2]]],
        [["x", "<i4", [2.0]]],
        [["x", "<i4", [1]], ["x", "<i4", [1]]],
        [["x", "|O", [1]]],
        [["x", "|b1", [8]]],  # bytes that are neither true nor false
        [[7, "<i4", [2]]],
        [["x", "<i4", [1 << 62, 1 << 62]]],
        [["x", "<i4"]],
        {"x": 1},
        None,
    ],
)
def test_arrays_that_are_not_those_of_the_body_are_refused(arrays):
    body = np.array([5, 6], np.int32).tobytes()
    sound = with_header({"kind": "k", "fields": {}, "arrays": [["x", "<i4", [2]]]}, body)
    assert over_a_socket(sound).arrays["x"].tolist() == [5, 6]
    with pytest.raises(FramingError, match="can't be read"):
        over_a_socket(with_header({"kind": "k", "fields": {}, "arrays": arrays}, body))


@pytest.mark.parametrize(("header", "body"), [(10, 1 << 62), (1 << 31, 0)])
@pytest.mark.parametrize("read", READERS[:2])
def test_a_length_that_lies_takes_no_memory(read, header, body):
    with pytest.raises(FramingError, match="too large"):
        read(framing.PREFIX.pack(framing.MAGIC, framing.VERSION, header, body, 0))


@pytest.mark.parametrize("read", READERS[:2])
def test_before_the_proof_only_small_messages_are_read(read):
    assert read(encoded(Message("hello", {"name": "x" * 3000})), framing.UNPROVED).kind == "hello"
    for large in (Message("hello", {"name": "x" * 4096}), Message("hello", {}, {"x": np.zeros(1)})):
        with pytest.raises(FramingError, match="too large"):
            read(encoded(large), framing.UNPROVED)


@readers
def test_another_version_is_told_by_its_number(read, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(framing, "VERSION", 9)
        data = encoded(MESSAGE)
    with pytest.raises(FramingError, match=r"of version 9, not 1"):
        read(data)


def test_objects_do_not_travel():
    with pytest.raises(ValueError, match="can't carry object"):
        framing.encode(Message("call", {}, {"x": np.array([object()])}))


def test_a_byte_now_and_then_does_not_put_off_a_deadline():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        start = time.monotonic()
        data = iter(encoded(MESSAGE))

        def drip(_):
            ours.sendall(bytes([next(data)]))
            return received(1)

        received = theirs.recv

        class Dripping:
            settimeout = theirs.settimeout

            def recv(self, count):
                time.sleep(0.05)
                return drip(count)

        with pytest.raises(TimeoutError):
            framing.receive(Dripping(), deadline=start + 0.3)
        assert time.monotonic() - start < 2


def test_a_file_of_messages_ends_at_the_first_that_is_torn():
    parts = [encoded(Message("record", {"number": n}, {"x": np.arange(n)})) for n in range(4)]
    data = b"".join(parts[:3]) + parts[3][:-1]
    found = list(framing.scan(data))
    assert [message.fields["number"] for message, _ in found] == [0, 1, 2]
    assert [end for _, end in found] == np.cumsum([len(part) for part in parts[:3]]).tolist()
