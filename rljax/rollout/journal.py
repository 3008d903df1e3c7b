"""The journal: finished groups on disk the moment they are finished, so that kill -9 loses none that can still be used.

A file is a sequence of records: magic, lengths and a CRC-32, then a JSON header, then raw little-endian numpy bytes. Nothing is
pickled. A record whose bytes are not all there, or don't match their checksum, ends the file: it is the one that was being
written when the process died.

What is recoverable, and why that is everything. A checkpoint at version v holds the book (buffer.py): data position, prompts
in flight, groups ready. Prompts admitted later are drawn from the source again, in the same order, with the same seeds.
What they gave is looked up in the journal first, and used if every token of it was sampled by versions up to v: those
weights belong to the run that goes on. Groups sampled by later versions come from weights that died with the process; they
are generated again. So the journal only ever takes groups of versions up to v, at most what admission lets in at v, and its
size is bounded however rarely checkpoints are made.

One file belongs to one checkpoint, `<directory>/<step>.journal`, and is deleted with it. The same format holds the finished
groups inside a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.errors import UserError
from rljax.rollout.buffer import Entry, Ticket, newest_version, oldest_version, ticket_from_json, ticket_to_json
from rljax.types import Finish, Group, Trajectory

MAGIC = b"RLJ1"
FRAME = struct.Struct("<4sIQI")  # magic, bytes of the header, bytes of the arrays, CRC-32 of both
ARRAYS = (("token_ids", "<i4"), ("loss_mask", "|b1"), ("behavior_logp", "<f4"), ("versions", "<i4"))

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """How a prompt ended: with a group, or rejected (None)."""

    ticket: Ticket
    group: Group | None
    rewards: tuple[float, ...] = ()  # of a rejected group's trajectories, for the metrics


def encode(record: Record) -> bytes:
    """One framed record."""
    header: dict[str, Any] = {"ticket": ticket_to_json(record.ticket), "rewards": record.rewards, "trajectories": None}
    body = b""
    if record.group is not None:
        header["trajectories"], body = pack(record.group.trajectories)
    head = json.dumps(header).encode()
    return FRAME.pack(MAGIC, len(head), len(body), zlib.crc32(body, zlib.crc32(head))) + head + body


def pack(trajectories: Sequence[Trajectory]) -> tuple[list[dict[str, Any]], bytes]:
    """JSON values, and the arrays of all of them as little-endian bytes."""
    entries = [
        {"length": len(t), "reward": t.reward, "components": dict(t.components), "finish": t.finish.value} for t in trajectories
    ]
    parts = [np.ascontiguousarray(getattr(t, name), dtype).tobytes() for t in trajectories for name, dtype in ARRAYS]
    return entries, b"".join(parts)


def unpack(entries: Sequence[Mapping[str, Any]], body: bytes | memoryview) -> tuple[Trajectory, ...]:
    """What `pack` packed; the arrays are views of the bytes. Raises ValueError, KeyError where the two don't fit."""
    trajectories, at = [], 0
    for entry in entries:
        arrays, length = {}, entry["length"]
        if not isinstance(length, int) or length < 0:  # numpy would take -1 for all there is
            raise ValueError(f"a trajectory of {length} tokens")
        for name, dtype in ARRAYS:
            arrays[name] = np.frombuffer(body, dtype, length, at) if length else np.zeros(0, dtype)
            at += arrays[name].nbytes
        trajectories.append(
            Trajectory(**arrays, reward=entry["reward"], components=entry["components"], finish=Finish(entry["finish"]))
        )
    if at != len(body):
        raise ValueError(f"{len(body)} bytes of arrays, not {at}")
    return tuple(trajectories)


def decode(data: bytes) -> Iterator[Record]:
    """The whole records at the beginning of data."""
    end = 0
    for start, body, end in _frames(data):
        yield _record(json.loads(data[start:body]), memoryview(data)[body:end])
    if end != len(data):
        log.warning("journal: %d bytes after the last whole record are ignored", len(data) - end)


def _frames(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Of each whole record: where its header starts, where its arrays start, where they end."""
    end = 0
    while len(data) - end >= FRAME.size:
        magic, head_size, body_size, checksum = FRAME.unpack_from(data, end)
        start = end + FRAME.size
        end = start + head_size + body_size
        if magic != MAGIC or end > len(data) or zlib.crc32(memoryview(data)[start:end]) != checksum:
            return
        yield start, start + head_size, end


def _record(header: dict[str, Any], body: memoryview) -> Record:
    ticket = ticket_from_json(header["ticket"])
    if header["trajectories"] is None:
        return Record(ticket, None, tuple(header["rewards"]))
    return Record(ticket, Group(ticket.prompt.uid, unpack(header["trajectories"], body)))


class Journal:
    """An append-only file of records. `append` hands the record to the kernel before it returns."""

    def __init__(self, path: Path) -> None:
        """Opens the file, cutting off a torn record that a kill left at its end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = max((end for _, _, end in _frames(path.read_bytes())), default=0) if path.exists() else 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)

    def append(self, record: Record) -> None:
        data = memoryview(encode(record))
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> list[Record]:
    """The records of a file, in order; none if there is no file."""
    return list(decode(path.read_bytes())) if path.exists() else []


def write_entries(path: Path, entries: Iterable[Entry]) -> None:
    """The buffer's finished groups as one file of records."""
    with path.open("wb") as file:
        for entry in entries:
            file.write(encode(Record(entry.ticket, entry.group)))


def read_entries(path: Path, count: int) -> list[Entry]:
    """Raises ValueError when the file does not hold `count` groups."""
    records = read(path)
    if len(records) != count:
        raise ValueError(f"{path.name} holds {len(records)} groups, not {count}")
    entries = []
    for record in records:
        assert record.group is not None
        oldest = oldest_version(record.group.trajectories)
        entries.append(Entry(oldest, record.ticket.index, record.ticket, record.group))
    return entries


class GroupLog:
    """The journals of a run: one a checkpoint.

    Example:

        journals = GroupLog(workdir / "journal")
        known = journals.begin(step, version)         # what was finished after that checkpoint and can be used
        journals.finished(ticket, group, rewards)
        journals.begin(step, version)                 # at the next checkpoint
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._journal: Journal | None = None
        self._version = 0

    def begin(self, step: int, version: int, *, fresh: bool = False) -> dict[tuple[str, int], Record]:
        """Records from here on belong to the checkpoint of this step. Returns those it has, by uid and attempt.

        Args:
          fresh: the checkpoint is being made now: a file of its name is of a run that took another course.
        """
        self.close()
        path = self._directory / f"{step}.journal"
        if fresh:
            path.unlink(missing_ok=True)
        self._journal, self._version = Journal(path), version
        return {(r.ticket.prompt.uid, r.ticket.attempt): r for r in read(path)}

    def finished(self, ticket: Ticket, group: Group, *, accepted: bool) -> None:
        """Writes a group down, if the weights that made it are those of the checkpoint or older."""
        if self._journal is None or newest_version(group.trajectories) > self._version:
            return
        record = Record(ticket, group) if accepted else Record(ticket, None, tuple(t.reward for t in group.trajectories))
        try:
            self._journal.append(record)
        except OSError as error:
            raise UserError(f"journal: cannot write to {self._directory}: {error.strerror} (make room there)") from error

    def forget(self, keep: Iterable[int]) -> None:
        """Deletes the journals of checkpoints that are gone."""
        names = {f"{step}.journal" for step in keep}
        for path in self._directory.glob("*.journal"):
            if path.name not in names:
                path.unlink()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
