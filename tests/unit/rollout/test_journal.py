"""Records come back as they were, whatever was being written when the process died."""

import contextlib
import errno
import os
import struct
import threading
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljax.errors import UserError
from rljax.messaging import framing
from rljax.rollout import journal
from rljax.rollout.buffer import Entry, Ticket
from rljax.types import Finish, Group, Prompt, Trajectory

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FLOATS = st.floats(allow_nan=False, width=32)


@st.composite
def trajectories(draw):
    n = draw(st.integers(0, 5))
    ints = st.lists(st.integers(-1, 2**31 - 1), min_size=n, max_size=n)
    mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return Trajectory(
        np.array(draw(ints), np.int32),
        np.array([False, *mask[1:]][:n], bool),
        np.array(draw(st.lists(FLOATS, min_size=n, max_size=n)), np.float32),
        np.array(draw(ints), np.int32),
        draw(st.floats(allow_nan=False)),
        draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2)),
        draw(st.sampled_from(Finish)),
    )


@st.composite
def records(draw):
    uid = f"{draw(st.integers(0, 9))}/{draw(st.integers(0, 99))}"
    fields = draw(st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=4), st.integers(), st.none()), max_size=2))
    prompt = Prompt(uid, ({"role": "user", "content": draw(st.text(max_size=8))},), fields)
    ticket = Ticket(draw(st.integers(0, 10**6)), prompt, draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    if draw(st.booleans()):
        return journal.Record(ticket, None, tuple(draw(st.lists(st.floats(allow_nan=False), max_size=3))))
    return journal.Record(ticket, Group(uid, tuple(draw(st.lists(trajectories(), max_size=3)))))


def _same(one, other):
    assert one.ticket == other.ticket and one.rewards == other.rewards
    assert (one.group is None) == (other.group is None)
    if one.group is None:
        return
    assert one.group.uid == other.group.uid
    for a, b in zip(one.group.trajectories, other.group.trajectories, strict=True):
        for name in ("token_ids", "loss_mask", "behavior_logp", "versions"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert getattr(a, name).dtype == getattr(b, name).dtype
        assert (a.reward, a.components, a.finish) == (b.reward, b.components, b.finish)


def decoded(data):
    return [journal.decode(message) for message, _ in framing.scan(data)]


@QUICK
@given(st.lists(records(), max_size=4))
def test_what_is_decoded_is_what_was_encoded(written):
    got = decoded(b"".join(map(journal.encode, written)))
    assert len(got) == len(written)
    for one, other in zip(got, written, strict=True):
        _same(one, other)


@QUICK
@given(st.lists(records(), min_size=1, max_size=3), st.data())
def test_a_torn_tail_loses_the_torn_record_alone(written, data):
    parts = [journal.encode(r) for r in written]
    whole = b"".join(parts[:-1])
    cut = data.draw(st.integers(0, len(parts[-1]) - 1))
    got = decoded(whole + parts[-1][:cut])
    assert len(got) == len(written) - 1


@QUICK
@given(records(), st.data())
def test_a_flipped_bit_is_never_read_as_a_record(record, data):
    encoded = bytearray(journal.encode(record))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert decoded(bytes(encoded)) == []


@QUICK
@given(records(), records(), st.binary(min_size=1, max_size=40))
def test_a_journal_goes_on_after_a_torn_tail(tmp_path_factory, first, second, torn):
    path = tmp_path_factory.mktemp("journal") / "0.journal"
    for record in (first, second):
        log = journal.Journal(path)
        log.append(record)
        log.close()
        if record is first:
            with path.open("ab") as file:
                file.write(torn)
    got = journal.read(path)
    assert len(got) == 2
    _same(got[1], second)


def _ticket(index, version):
    ids = np.array([1, 2], np.int32)
    trajectory = Trajectory(
        ids, np.array([False, True]), np.zeros(2, np.float32), np.array([-1, version], np.int32), 0.5, {}, Finish.STOP
    )
    ticket = Ticket(index, Prompt(f"0/{index}", (), {}))
    return ticket, Group(ticket.prompt.uid, (trajectory,))


@pytest.fixture
def journals(tmp_path):
    """Makes journals in the test's directory, and closes them at its end."""
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(contextlib.closing(journal.Journals(tmp_path)))


def test_only_groups_whose_weights_will_still_exist_are_kept(tmp_path, journals):
    log = journals()
    assert log.begin(7, 3) == {}
    for index, version in enumerate([2, 3, 4]):
        log.append(*_ticket(index, version), accepted=True)
    log.append(*_ticket(9, 3), accepted=False)
    known = journals().begin(7, 3)
    assert {uid for uid, _ in known} == {"0/0", "0/1", "0/9"}
    assert known["0/9", 0].group is None and known["0/9", 0].rewards == (0.5,)


def test_the_journal_stays_small_however_long_no_checkpoint_is_made(tmp_path, journals):
    log = journals()
    log.begin(0, 0)
    sizes = []
    for version in range(50):
        for index in range(4):
            log.append(*_ticket(4 * version + index, version), accepted=True)
        sizes.append((tmp_path / "0.journal").stat().st_size)
    assert set(sizes) == {sizes[0]} and sizes[0] > 0


def test_a_new_checkpoint_starts_an_empty_journal_and_old_ones_go(tmp_path, journals):
    log = journals()
    log.begin(0, 0)
    for step in (5, 6, 7):
        log.begin_beside(step, step)
        log.append(*_ticket(step, step), accepted=True)
        log.settle(step)
    log.prune([5])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["5.journal", "7.journal"]  # and the one in use
    log.begin_beside(5, 5)  # it was left over
    assert {uid for uid, _ in log.begin(7, 7)} == {"0/7"} and log.begin(5, 5) == {}


@pytest.mark.parametrize("whole", [True, False, None])
def test_while_a_checkpoint_is_written_both_journals_take_what_their_weights_sampled(journals, whole):
    """Whole, given up, or killed in between: what is gone on from has all that it can use."""
    log = journals()
    log.begin(1, 1)
    log.append(*_ticket(0, 0), accepted=True)
    log.begin_beside(4, 4)
    for index, version in ((1, 1), (2, 4), (3, 5)):
        log.append(*_ticket(index, version), accepted=True)
    if whole is not None:
        (log.settle if whole else log.abandon)(4)
        log.append(*_ticket(4, 1), accepted=True)
    known = {step: {uid for uid, _ in journals().begin(step, step)} for step in (1, 4)}
    before, beside = {"0/0", "0/1"}, {"0/1", "0/2"}
    assert (
        known
        == {
            True: {1: before, 4: beside | {"0/4"}},
            False: {1: before | {"0/4"}, 4: set()},
            None: {1: before, 4: beside},
        }[whole]
    )


def test_entries_of_a_checkpoint_are_all_there_or_it_is_not_used(tmp_path):
    ticket, group = _ticket(3, 2)
    journal.write_entries(tmp_path / "ready", [Entry(2, 3, ticket, group)])
    (entry,) = journal.read_entries(tmp_path / "ready", 1)
    assert (entry.oldest, entry.index, entry.ticket) == (2, 3, ticket)
    with pytest.raises(ValueError, match="not 2"):
        journal.read_entries(tmp_path / "ready", 2)


@pytest.mark.parametrize("version", ["before versions", "a later one"])
def test_a_file_of_another_version_is_refused_in_one_line_and_left_as_it_is(tmp_path, monkeypatch, version):
    path, (ticket, group) = tmp_path / "0.journal", _ticket(0, 0)
    with monkeypatch.context() as later:
        later.setattr(framing, "VERSION", framing.VERSION + 1)
        data = journal.encode(journal.Record(ticket, group))
    path.write_bytes(
        struct.pack("<4sIQI", b"RLJ1", 2, 3, zlib.crc32(b"{}abc")) + b"{}abc" if version == "before versions" else data
    )
    before = path.read_bytes()
    for use in (lambda: journal.Journals(tmp_path).begin(0, 0), lambda: journal.read_entries(path, 1)):
        with pytest.raises(UserError, match=r"journal: .*0\.journal can't be read: of .*version.* another --workdir") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_arrays_that_do_not_fit_their_trajectories_are_no_group():
    _, group = _ticket(0, 0)
    entries, arrays = journal.pack(group.trajectories * 2)
    assert len(journal.unpack(entries, arrays)) == 2
    for wrong in (
        arrays | {"token_ids": arrays["token_ids"][:-1]},
        arrays | {"logp": arrays["token_ids"]} | {"behavior_logp": arrays["behavior_logp"].astype(np.float64)},
        {name: array.reshape(2, 2) for name, array in arrays.items()},
    ):
        with pytest.raises(ValueError, match="of shape"):
            journal.unpack(entries, wrong)
    for length in (-1, True, "2", 2.0, None):
        with pytest.raises(ValueError, match="trajectories of"):
            journal.unpack([entries[0], entries[1] | {"length": length}], arrays)


def test_a_full_disk_is_one_line(journals):
    log = journals()
    log.begin(0, 0)
    log._open[0][0].close()
    log._open[0][0]._file = journal.os.open("/dev/full", journal.os.O_WRONLY)
    with pytest.raises(UserError, match="No space left"):
        log.append(*_ticket(0, 0), accepted=True)


def test_a_record_that_the_kernel_takes_in_pieces_is_whole(tmp_path, journals, monkeypatch):
    write = journal.os.write
    monkeypatch.setattr(journal.os, "write", lambda file, data: write(file, data[:7]))
    log = journals()
    log.begin(0, 0)
    for index in range(2):
        log.append(*_ticket(index, 0), accepted=True)
    assert [record.ticket.index for record in journal.read(tmp_path / "0.journal")] == [0, 1]


def _record():
    tokens = np.arange(3, dtype=np.int32)
    trajectory = Trajectory(tokens, tokens > 0, np.zeros(3, np.float32), np.array([-1, 0, 0], np.int32), 1.0, {}, Finish.STOP)
    return journal.Record(Ticket(0, Prompt("0/0", (), {})), Group("0/0", (trajectory,)))


def _watched_syncs(monkeypatch):
    """Notes each fsync: the size that the file had, by its inode. Returns the sizes and an event that is set by each."""
    synced, happened, fsync = {}, threading.Event(), os.fsync

    def note(handle):
        fsync(handle)
        found = os.fstat(handle)
        synced[found.st_ino] = found.st_size
        happened.set()

    monkeypatch.setattr(os, "fsync", note)
    return synced, happened


def test_what_is_appended_is_synced_soon_and_all_of_it_when_the_journal_closes(tmp_path, monkeypatch):
    synced, happened = _watched_syncs(monkeypatch)
    monkeypatch.setattr(journal, "SYNC_INTERVAL", 0.01)
    written = journal.Journal(tmp_path / "0.journal")
    inode = (tmp_path / "0.journal").stat().st_ino
    assert tmp_path.stat().st_ino in synced  # the file's own entry
    for _ in range(2):
        happened.clear()
        written.append(_record())
        assert happened.wait(30) and synced[inode] == (tmp_path / "0.journal").stat().st_size
    monkeypatch.setattr(journal, "SYNC_INTERVAL", 3600.0)
    for _ in range(3):
        written.append(_record())
    written.close()
    assert synced[inode] == (tmp_path / "0.journal").stat().st_size


def test_a_sync_that_fails_is_the_next_appends_error(tmp_path, monkeypatch):
    written = journal.Journals(tmp_path)
    written.begin(0, 0)
    monkeypatch.setattr(journal, "SYNC_INTERVAL", 0.0)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
    ticket = _record().ticket
    with pytest.raises(UserError, match=r"journal: cannot write to .*: Input/output error"):
        while True:
            written.append(ticket, _record().group, accepted=True)
    written.close()


def test_a_prompts_attempts_are_told_apart(journals):
    """Each has other seeds, so the group of one is none of another's."""
    prompt = Prompt("0/7", ({"role": "user", "content": "a"},), {})
    rejected = {attempt: Ticket(7, prompt, attempt) for attempt in (0, 2)}
    written = journals()
    assert not written.begin(0, 0)
    for attempt, ticket in rejected.items():
        written.append(ticket, Group("0/7", (_trajectory(float(attempt)),)), accepted=False)
    written.close()
    found = journals().begin(0, 0)
    assert {key: (record.ticket, record.rewards) for key, record in found.items()} == {
        ("0/7", attempt): (ticket, (float(attempt),)) for attempt, ticket in rejected.items()
    }


def _trajectory(reward):
    one = np.zeros(1, np.int32)
    return Trajectory(one, np.zeros(1, bool), np.zeros(1, np.float32), one, reward, {}, Finish.STOP)
