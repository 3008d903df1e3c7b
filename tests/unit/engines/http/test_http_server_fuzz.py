"""Bodies, paths and bytes that nobody meant: our server answers or cuts off, and works afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljax.engines.http.server import UNSUPPORTED
from rljax.messaging import web_server
from tests.unit.engines.http.served import ANSWER, GENERATE, Served

PATHS = (
    "/generate",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/flush_cache",
    "/update_weights_from_disk",
    *UNSUPPORTED,
)
GETS = ("/health", "/health_generate", "/get_model_info", "/model_info", "/get_server_info", "/server_info")
KEYS = st.sampled_from(
    ["rid", "input_ids", "text", "sampling_params", "stream", "return_logprob", "incremental", "extra_key", "mode", "n"]
    + ["abort_all", "model_path", "weight_version", "flush_cache", "max_new_tokens", "min_new_tokens", "temperature", "min_p"]
    + ["top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "sampling_seed"]
)
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.sampled_from([0, 1, -1, 2**31, 2**63, 1e308])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.sampled_from(["in_place", "abort", "..", "/etc"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=5),
    max_leaves=15,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=8)


@st.composite
def nearly_right(draw) -> dict[str, Any]:
    """Draws a valid /generate body with a few broken fields."""
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}, "stream": draw(st.booleans())}
    for _ in range(draw(st.integers(1, 2))):
        target = draw(st.sampled_from([body, body["sampling_params"]]))
        if isinstance(target, dict):
            target[draw(KEYS)] = draw(VALUES)
        if not isinstance(body["sampling_params"], dict):
            break
    return body


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    with contextlib.closing(Served(tmp_path_factory.mktemp("weights"))) as served:
        yield served


def survives(served: Served, status: int, text: str, sent: object) -> None:
    assert status < 500, (status, text, sent)
    served.loop._loop.call_soon_threadsafe(served.sampler.running.set)  # a pause that was meant so


FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(st.sampled_from(PATHS), OBJECTS | VALUES)
def test_fuzz_any_json_anywhere(fuzzed, path, body):
    survives(fuzzed, *fuzzed.post(path, json.dumps(body).encode()), (path, body))


@FUZZ
@given(nearly_right())
def test_fuzz_almost_right_requests(fuzzed, body):
    status, text = fuzzed.post("/generate", json.dumps(body).encode())
    survives(fuzzed, status, text, body)
    assert status in (200, 400, 413)


@FUZZ
@given(st.sampled_from(PATHS), st.binary(max_size=200))
def test_fuzz_bytes(fuzzed, path, body):
    survives(fuzzed, *fuzzed.post(path, body), (path, body))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"input_ids": [' + b"9" * 10_000 + b"]}",
        b'{"temperature": NaN}',
        b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}',
        b'{"text": "\\ud800"}',
        b'{"rid": "\\ud800", "input_ids": [1], "sampling_params": {"max_new_tokens": 1}}',
        b"\xff\xfe\x00",
        b'{"input_ids": [[1, 2], [3]]}',
        b'{"input_ids": [true]}',
    ],
)
def test_bodies_that_parsers_choke_on(fuzzed, body):
    for path in PATHS:
        status, text = fuzzed.post(path, body)
        survives(fuzzed, status, text, body[:50])
        assert path != "/generate" or status == 400, (text, body[:50])


def test_wrong_methods_paths_and_encodings(fuzzed):
    for path in (*PATHS, *GETS, "/", "/nothing", "/../etc/passwd", "/%00", "/generate/"):
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS", "BREW"):
            status, text = fuzzed.call(method, path)
            survives(fuzzed, status, text, (method, path))
    for headers in (
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "nonsense"},
        {"Content-Type": "text/x; charset=nonsense"},
    ):
        status, text = fuzzed.post("/generate", b"not gzip", headers=headers)
        survives(fuzzed, status, text, headers)


@pytest.mark.parametrize(
    "raw",
    [
        b"\0\0\0\0\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 50_000 + b"\r\n",
    ],
)
def test_broken_http_is_answered_or_cut_off(fuzzed, raw):
    with socket.create_connection(fuzzed.address, timeout=ANSWER) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        assert not answer.startswith(b"HTTP/1.1 5") or answer.startswith(b"HTTP/1.1 505"), answer[:100]
    assert fuzzed.call("GET", "/health")[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["silent", "half", "idle"])
def test_a_connection_without_a_request_is_closed(weights, monkeypatch, sent):
    monkeypatch.setattr(web_server, "IDLE_TIMEOUT", 0.05)

    async def until_closed(address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        await asyncio.wait_for(reader.read(), ANSWER)  # raises TimeoutError while the server keeps it
        writer.close()

    with contextlib.closing(Served(weights)) as served:
        served.loop.run(until_closed(served.address))


def test_after_all_that_the_server_works_and_holds_nothing(fuzzed):
    assert fuzzed.post("/generate", GENERATE)[0] == 200
    assert fuzzed.sampler.under_way == 0
    assert len(os.listdir("/proc/self/fd")) < 200
