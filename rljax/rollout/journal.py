"""The journal: finished groups on disk the moment they are finished, so that kill -9 loses none
that can still be used.

A file is a sequence of messages (rljax/messaging/framing.py), one per record. A record whose bytes
are not all there, or don't match their checksum, ends the file: it is the one that was being
written when the process died. A file in another version of the format is refused.

What is recoverable, and why that is everything. A checkpoint at version v holds the book
(buffer.py): data position, prompts in flight, groups ready. Prompts admitted later are drawn from
the source again, in the same order, with the same seeds. What they gave is looked up in the
journal first, and used if every token of it was sampled by versions up to v: those weights belong
to the run that goes on. Groups sampled by later versions come from weights that died with the
process; they are generated again. So the journal only ever takes groups of versions up to v, at
most what admission lets in at v, and its size is bounded however rarely checkpoints are made.

One file belongs to one checkpoint, `<directory>/<step>.journal`, and is deleted with it. The same
format holds the finished groups inside a checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.errors import UserError
from rljax.messaging import framing
from rljax.messaging.framing import FramingError, Message
from rljax.rollout.buffer import Entry, Ticket, newest_version, oldest_version, ticket_from_json, ticket_to_json
from rljax.types import Finish, Group, Trajectory

UNVERSIONED = struct.Struct("<4sIQI")  # begins a record of the format before version 1: RLJ1, two lengths, CRC-32 of the rest
ARRAYS = (("token_ids", "<i4"), ("loss_mask", "|b1"), ("behavior_logp", "<f4"), ("versions", "<i4"))

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """How a prompt ended: with a group, or rejected (None)."""

    ticket: Ticket
    group: Group | None
    rewards: tuple[float, ...] = ()  # of a rejected group's trajectories, for the metrics


def encode(record: Record) -> bytes:
    """Encodes a record as one message."""
    fields: dict[str, Any] = {"ticket": ticket_to_json(record.ticket), "rewards": record.rewards, "trajectories": None}
    arrays: dict[str, np.ndarray] = {}
    if record.group is not None:
        fields["trajectories"], arrays = pack(record.group.trajectories)
    return b"".join(framing.encode(Message("record", fields, arrays)))


def decode(message: Message) -> Record:
    """Decodes a record; its arrays are views of the message's."""
    ticket = ticket_from_json(message.fields["ticket"])
    if message.fields["trajectories"] is None:
        return Record(ticket, None, tuple(message.fields["rewards"]))
    return Record(ticket, Group(ticket.prompt.uid, unpack(message.fields["trajectories"], message.arrays)))


def pack(trajectories: Sequence[Trajectory]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Packs trajectories into JSON values, one per trajectory, and arrays [tokens of all of them]."""
    entries = [
        {"length": len(t), "reward": t.reward, "components": dict(t.components), "finish": t.finish.value} for t in trajectories
    ]
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(t, name), dtype) for t in trajectories)])
        for name, dtype in ARRAYS
    }
    return entries, arrays


def unpack(entries: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> tuple[Trajectory, ...]:
    """Unpacks what `pack` packed, into views of the arrays.

    Raises ValueError, KeyError, TypeError where the two don't fit.
    """
    lengths = [entry["length"] for entry in entries]
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError(f"trajectories of {lengths} tokens")
    for name, dtype in ARRAYS:
        if arrays[name].dtype != np.dtype(dtype) or arrays[name].shape != (sum(lengths),):
            raise ValueError(f"{name}: {arrays[name].dtype} of shape {arrays[name].shape} for {sum(lengths)} tokens")
    trajectories, start = [], 0
    for entry, length in zip(entries, lengths, strict=True):
        own = {name: arrays[name][start : start + length] for name, _ in ARRAYS}
        start += length
        trajectories.append(
            Trajectory(**own, reward=entry["reward"], components=entry["components"], finish=Finish(entry["finish"]))
        )
    return tuple(trajectories)


def _whole_messages(path: Path) -> list[tuple[Message, int]]:
    """The whole messages of a file, each with the position behind it; none if there is no file.

    Raises:
      UserError: the file is in another version of the format.
    """
    data = path.read_bytes() if path.exists() else b""
    try:
        if _is_unversioned(data):
            raise FramingError("of the version before 1")
        found = list(framing.scan(data))
    except FramingError as error:
        raise UserError(
            f"journal: {path} can't be read: {error} (go on with the rljax that wrote it, or in another --workdir)"
        ) from None
    end = found[-1][1] if found else 0
    if end != len(data):
        log.warning("journal: %d bytes after the last whole record of %s are ignored", len(data) - end, path)
    return found


def _is_unversioned(data: bytes) -> bool:
    """Whether a file begins with a whole record of the format before version 1."""
    if len(data) < UNVERSIONED.size:
        return False
    magic, header, body, checksum = UNVERSIONED.unpack_from(data)
    rest = memoryview(data)[UNVERSIONED.size : UNVERSIONED.size + header + body]
    return bool(magic == b"RLJ1" and len(rest) == header + body > 0 and zlib.crc32(rest) == checksum)


class Journal:
    """An append-only file of records.

    `append` hands the record to the kernel before it returns.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, cutting off a torn record that a kill left at its end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = max((end for _, end in _whole_messages(path)), default=0)
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
    """Reads the records of a file, in order; none if there is no file.

    Raises UserError at another version's.
    """
    return [decode(message) for message, _ in _whole_messages(path)]


def write_entries(path: Path, entries: Iterable[Entry]) -> None:
    """Writes the buffer's finished groups as one file of records."""
    with path.open("wb") as file:
        for entry in entries:
            file.write(encode(Record(entry.ticket, entry.group)))


def read_entries(path: Path, count: int) -> list[Entry]:
    """Reads what `write_entries` wrote.

    Raises ValueError when the file does not hold `count` groups.
    """
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
    """The journals of a run: one per checkpoint.

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
        """Records from here on belong to the checkpoint of this step. Returns those it has, by uid
        and attempt.

        Args:
          fresh: the checkpoint is being made now: a file of its name is of a run that took another
            course.
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
