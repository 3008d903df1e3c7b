"""Journal: groups are written to disk as soon as they are finished, so that kill -9 loses none.

A file is a sequence of messages (rljax/messaging/framing.py), one per record. The file ends at the
first record that is incomplete or does not match its checksum: the process died while writing it. A
file in another version of the format is refused.

A journal recovers everything that can still be used. A checkpoint at version v holds the buffer:
data position, prompts in flight, groups that are ready. After a restart, later prompts are drawn
from the source again, in the same order and with the same seeds. Each is first looked up in the
journal. Its group is used if all of its tokens were sampled by versions up to v, because the
resumed run has those weights. Weights of later versions were lost with the process, so groups that
they sampled are generated again. The journal therefore only stores groups of versions up to v. That
is at most what the buffer admits at v, so the size of a journal is bounded, however rarely
checkpoints are made.

There is one file per checkpoint, `<directory>/<step>.journal`, deleted with the checkpoint. While a
checkpoint is written there are two: a kill goes on from the older one until the newer one is whole.
The finished groups inside a checkpoint have the same format.

A group is with the kernel when `append` returns, so the death of the process loses none. A thread
of the journal syncs the file to the disk at most SYNC_INTERVAL later: a power cut, or the death of
the machine, loses what was finished since, which is generated again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.errors import UserError
from rljax.messaging import framing
from rljax.messaging.framing import FramingError, Message
from rljax.rollout.buffer import Entry, Ticket, newest_version, oldest_version, ticket_from_json, ticket_to_json
from rljax.types import Finish, Group, Trajectory, episode_rewards

UNVERSIONED = struct.Struct("<4sIQI")  # start of a record before version 1: RLJ1, two lengths, CRC-32 of the rest
SYNC_INTERVAL = 2.0  # seconds between two syncs
ARRAYS = (("token_ids", "<i4"), ("loss_mask", "|b1"), ("behavior_logp", "<f4"), ("versions", "<i4"))

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Outcome of a prompt: its group, or None if it was rejected."""

    ticket: Ticket
    group: Group | None
    rewards: tuple[float, ...] = ()  # rewards of a rejected group's episodes, for metrics


def encode(record: Record) -> bytes:
    """Encodes a record as one message."""
    fields: dict[str, Any] = {"ticket": ticket_to_json(record.ticket), "rewards": record.rewards, "trajectories": None}
    arrays: dict[str, np.ndarray] = {}
    if record.group is not None:
        fields["trajectories"], arrays = pack(record.group.trajectories)
    return b"".join(framing.encode(Message("record", fields, arrays)))


def decode(message: Message) -> Record:
    """Decodes a record. Its arrays are views of those of the message."""
    ticket = ticket_from_json(message.fields["ticket"])
    if message.fields["trajectories"] is None:
        return Record(ticket, None, tuple(message.fields["rewards"]))
    return Record(ticket, Group(ticket.prompt.uid, unpack(message.fields["trajectories"], message.arrays)))


def pack(trajectories: Sequence[Trajectory]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Packs trajectories into JSON values, one per trajectory, and arrays [N] of all tokens."""
    entries = [
        {"length": len(t), "reward": t.reward, "components": dict(t.components), "finish": t.finish.value}
        | ({} if t.episode is None else {"episode": t.episode})
        | ({"pictures": list(t.pictures)} if t.pictures else {})
        for t in trajectories
    ]
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *(np.asarray(getattr(t, name), dtype) for t in trajectories)])
        for name, dtype in ARRAYS
    }
    return entries, arrays


def unpack(entries: Sequence[Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> tuple[Trajectory, ...]:
    """Unpacks trajectories, the inverse of `pack`. Their arrays are views of `arrays`.

    Raises:
      ValueError, KeyError, TypeError: entries and arrays don't match.
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
            Trajectory(
                **own,
                reward=entry["reward"],
                components=entry["components"],
                finish=Finish(entry["finish"]),
                episode=_episode(entry),
                pictures=_pictures(entry),
            )
        )
    return tuple(trajectories)


def _episode(entry: Mapping[str, Any]) -> int | None:
    episode = entry.get("episode")  # only parts of episodes have it
    if episode is not None and (type(episode) is not int or episode < 0):
        raise ValueError(f"episode {episode!r}")
    return episode


def _pictures(entry: Mapping[str, Any]) -> tuple[str, ...]:
    pictures = entry.get("pictures", [])  # only prompts with pictures have it
    if not isinstance(pictures, list) or not all(isinstance(url, str) for url in pictures):
        raise ValueError("pictures: a list of data URLs is needed")
    return tuple(pictures)


def _whole_messages(path: Path) -> list[tuple[Message, int]]:
    """Returns the complete messages of a file, each with the position of its end.

    Returns none if there is no file.

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
    """Returns whether a file begins with a complete record of the format before version 1."""
    if len(data) < UNVERSIONED.size:
        return False
    magic, header, body, checksum = UNVERSIONED.unpack_from(data)
    rest = memoryview(data)[UNVERSIONED.size : UNVERSIONED.size + header + body]
    return bool(magic == b"RLJ1" and len(rest) == header + body > 0 and zlib.crc32(rest) == checksum)


class Journal:
    """Append-only file of records. `append` returns when the kernel has the record."""

    def __init__(self, path: Path) -> None:
        """Opens the file, and cuts off an incomplete record at its end."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = max((end for _, end in _whole_messages(path)), default=0)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)
        _sync_entries(path.parent)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._unsynced = False
        self._syncing: threading.Thread | None = None
        self._failed: OSError | None = None  # of a sync

    def append(self, record: Record) -> None:
        """Writes a record. Raises OSError, also of a sync that has failed since the last one."""
        if self._failed is not None:
            raise self._failed
        data = memoryview(encode(record))
        while data:
            data = data[os.write(self._file, data) :]
        with self._lock:
            self._unsynced = True
            if self._syncing is None:
                self._syncing = threading.Thread(target=self._sync_later, name="journal", daemon=True)
                self._syncing.start()

    def _sync_later(self) -> None:
        """Syncs what was appended, off the event loop: a disk may take seconds."""
        while True:
            self._closed.wait(SYNC_INTERVAL)
            with self._lock:
                if not self._unsynced:
                    self._syncing = None
                    return
                self._unsynced = False
            try:
                os.fsync(self._file)
            except OSError as error:
                self._failed = error

    def close(self) -> None:
        """Closes the file. What was appended is on the disk then."""
        self._closed.set()
        if (syncing := self._syncing) is not None:
            syncing.join()
        os.close(self._file)


def _sync_entries(directory: Path) -> None:
    """Syncs a directory, so that a file that was made in it is found after a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> list[Record]:
    """Reads the records of a file, in order; none if there is no file.

    Raises:
      UserError: the file is in another version of the format.
    """
    return [decode(message) for message, _ in _whole_messages(path)]


def write_entries(path: Path, entries: Iterable[Entry]) -> None:
    """Writes the buffer's finished groups as one file of records."""
    with path.open("wb") as file:
        for entry in entries:
            file.write(encode(Record(entry.ticket, entry.group)))


def read_entries(path: Path, count: int) -> list[Entry]:
    """Reads what `write_entries` wrote.

    Raises:
      ValueError: the file does not contain `count` groups.
    """
    records = read(path)
    if len(records) != count:
        raise ValueError(f"{path.name} contains {len(records)} groups, not {count}")
    entries = []
    for record in records:
        assert record.group is not None
        oldest = oldest_version(record.group.trajectories)
        entries.append(Entry(oldest, record.ticket.index, record.ticket, record.group))
    return entries


class Journals:
    """Journals of a run, one per checkpoint.

    Example:

        journals = Journals(workdir / "journal")
        recovered = journals.begin(step, version)     # groups finished after that checkpoint
        journals.append(ticket, group, accepted=True)
        journals.begin_beside(step, version)          # the next checkpoint is being written
        journals.settle(step)                         # it is whole
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[int, tuple[Journal, int]] = {}  # and the checkpoint's version, by its step

    def begin(self, step: int, version: int) -> dict[tuple[str, int], Record]:
        """Opens the journal of the checkpoint of this step, to which `append` then writes.

        Args:
          version: the checkpoint's version.

        Returns:
          Records that the journal contains, by uid and attempt.
        """
        self.close()
        path = self._path(step)
        self._open[step] = Journal(path), version
        return {(r.ticket.prompt.uid, r.ticket.attempt): r for r in read(path)}

    def begin_beside(self, step: int, version: int) -> None:
        """Opens the journal of a checkpoint that is made now, beside the one before.

        `append` writes to both until `settle` or `abandon`. A journal of this step that there is
        already, but not open, is left over from steps that were undone, and is deleted.
        """
        if step in self._open:  # of a new run, which began with the state that is saved now
            return
        self._path(step).unlink(missing_ok=True)
        self._open[step] = Journal(self._path(step)), version

    def settle(self, step: int) -> None:
        """Closes all journals but that of the checkpoint of this step, which is whole now."""
        for other in self._open.keys() - {step}:
            self._open.pop(other)[0].close()

    def abandon(self, step: int) -> None:
        """Deletes the journal of a checkpoint that could not be written, if it has its own."""
        if len(self._open) == 1 or step not in self._open:
            return
        self._open.pop(step)[0].close()
        self._path(step).unlink(missing_ok=True)

    def append(self, ticket: Ticket, group: Group, *, accepted: bool) -> None:
        """Writes a group to the journals of those checkpoints whose weights sampled all of it.

        Raises:
          UserError: the disk is full or can't be written.
        """
        newest = newest_version(group.trajectories)
        record = Record(ticket, group) if accepted else Record(ticket, None, episode_rewards(group.trajectories))
        for journal, version in self._open.values():
            if newest > version:
                continue
            try:
                journal.append(record)
            except OSError as error:
                raise UserError(f"journal: cannot write to {self._directory}: {error.strerror} (make room there)") from error

    def prune(self, steps: Iterable[int]) -> None:
        """Deletes the journals of all checkpoints but those of these steps, and those in use."""
        names = {self._path(step).name for step in (*steps, *self._open)}
        for path in self._directory.glob("*.journal"):
            if path.name not in names:
                path.unlink()

    def steps(self) -> set[int]:
        """Returns the steps of the checkpoints that have a journal.

        0 is of a new run's beginning, whose journal is there until the first checkpoint is whole:
        without it, the newest is that of a checkpoint that was whole.
        """
        return {int(path.stem) for path in self._directory.glob("*.journal") if path.stem.isdigit()}

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1][0].close()

    def _path(self, step: int) -> Path:
        return self._directory / f"{step}.journal"
