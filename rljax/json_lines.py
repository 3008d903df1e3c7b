"""Files of JSON lines that a run appends to, in parts, and never reads as a whole to go on.

samples.jsonl             the newest part, which is appended to
samples.00000120.jsonl    a part before it, by the last step in it

Each line is an object with a `step`, in the order of the steps. A part ends with a whole step, so
the name of a part tells which steps it has and a run that goes on reads lines from the end.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from rljax.errors import UserError

BLOCK = 1 << 16  # bytes read at once from the end
CHECKED = 1 << 22  # bytes before the end in which damaged lines are looked for when a file is cut

log = logging.getLogger(__name__)


class Last(NamedTuple):
    """Last line of a file. Example: Last(position=8190, step=12, entry={"loss": 0.3})"""

    position: int  # bytes before it in the newest part
    step: int | None  # None in an empty file
    entry: dict[str, Any]  # without the step


class LineFile:
    """Writer of a file of JSON lines, and of its parts.

    Example:

        file = LineFile(workdir / "samples.jsonl", 50, part_bytes=64 << 20, most_bytes=1 << 30)
        file.append(51, '{"step": 51, "reward": 1.0}')
        file.close()
    """

    def __init__(self, path: Path, first_step: int, *, part_bytes: int, most_bytes: int | None = None, rare: bool = False):
        """Cuts the lines of steps after `first_step`.

        Args:
          part_bytes: size from which on the next step begins a new part.
          most_bytes: size of all parts together; older ones are deleted, but never the very first,
            to compare with. None: all are kept.
          rare: the file is made with its first line.

        Raises:
          UserError: it can't be written.
        """
        self._path, self._part_bytes, self._most_bytes = path, part_bytes, most_bytes
        self.last = cut(path, first_step)
        self._step, self._start = self.last.step, self.last.position
        self._file: IO[bytes] | None = None
        if not rare or path.exists():
            self._open()

    def append(self, step: int, line: str) -> None:
        """Appends a line, whose step is never less than the last one's."""
        if self._file is not None and self._step not in (None, step) and self._file.tell() >= self._part_bytes:
            self._begin_part()
        file = self._file or self._open()
        self._start, self._step = file.tell(), step
        file.write(f"{line}\n".encode())
        file.flush()

    def replace(self, line: str) -> None:
        """Writes another line in place of the last one, of the same step."""
        file = self._file or self._open()
        file.seek(self._start)
        file.write(f"{line}\n".encode())
        file.truncate()
        file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> IO[bytes]:
        try:
            self._path.touch()
            self._file = self._path.open("rb+")
        except OSError as error:
            raise UserError(f"--workdir: cannot write {self._path}: {error.strerror}") from None
        self._file.seek(0, os.SEEK_END)
        return self._file

    def _begin_part(self) -> None:
        """Names the full part by its last step, and deletes older ones where there is no room."""
        self.close()
        os.replace(self._path, self._path.with_name(f"{self._path.stem}.{self._step:08d}{self._path.suffix}"))
        self._open()
        if self._most_bytes is None:
            return
        sizes = {path: path.stat().st_size for path in parts(self._path)[:-1]}
        for path in list(sizes)[1:]:
            if sum(sizes.values()) + self._part_bytes <= self._most_bytes:
                break
            path.unlink()
            del sizes[path]


# Parts ----------------------------------------------------------------------------------------------------------------


def parts(path: Path) -> list[Path]:
    """Returns the parts of a file that exist, the oldest first."""
    return [*_older(path).values(), *([path] if path.is_file() else [])]


def _older(path: Path) -> dict[int, Path]:
    """Returns the parts before the newest by their last step, ascending."""
    found = {part.stem.rpartition(".")[2]: part for part in path.parent.glob(f"{path.stem}.*{path.suffix}")}
    return dict(sorted((int(step), part) for step, part in found.items() if step.isdecimal() and part.is_file()))


def misplaced(path: Path) -> list[Path]:
    """Returns what has the name of a file or of a part of it and is none, such as a directory."""
    named = [path, *sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"))]
    named = [each for each in named if each == path or each.stem.rpartition(".")[2].isdecimal()]
    return [each for each in named if each.exists() and not each.is_file()]


def lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of all parts of a file, the oldest first, with their newlines."""
    for part in parts(path):
        with part.open("rb") as file:
            yield from file


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects that have a step, of all parts; the last line may still be in the making."""
    return (entry for line in lines(path) if (entry := entry_of(line)) is not None)


def ends(path: Path, most: int) -> Iterator[bytes]:
    """Yields all lines of a file; of one above `most` bytes the first and the last of that size."""
    found = parts(path)
    if sum(part.stat().st_size for part in found) <= most:
        yield from lines(path)
        return
    yield from _of_size(lines(path), most // 2)
    yield from reversed(list(_of_size((line for part in reversed(found) for line in _backwards_in(part)), most // 2)))


def _of_size(some: Iterable[bytes], most: int) -> Iterator[bytes]:
    for line in some:
        most -= len(line)
        if most < 0:
            return
        yield line


def _backwards_in(part: Path) -> Iterator[bytes]:
    with part.open("rb") as file:
        yield from (line for _, line in backwards(file))


def newest_step(path: Path) -> int | None:
    """Returns the step of the last line that has one; None if there is none."""
    entries = (entry_of(line) for part in reversed(parts(path)) for line in _backwards_in(part))
    return next((entry["step"] for entry in entries if entry is not None), None)


def cut(path: Path, step: int) -> Last:
    """Cuts a file and its parts after the last complete line of a step up to `step`.

    Reads the lines that go, and CHECKED bytes before them: damaged lines there are told, and left
    as they are. Damaged lines that go are told too, except the very last, which a kill leaves.
    """
    older = _older(path)
    while older and max(older) >= step:  # what is newer has later steps only
        os.replace(older.pop(max(older)), path)
    while True:
        last = _cut_part(path, step) if path.exists() else None
        if last is not None or not older:
            return last or Last(0, None, {})
        os.replace(older.pop(max(older)), path)


def _cut_part(path: Path, step: int) -> Last | None:
    """Cuts the newest part. Returns its last line; None if it has none of a step up to `step`."""
    last, end, damaged, lost = None, 0, list[int](), list[int]()
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        for position, line in backwards(file):
            entry = entry_of(line)
            if last is None and entry is not None and entry["step"] <= step:
                last, end = Last(position, entry["step"], {k: v for k, v in entry.items() if k != "step"}), position + len(line)
            elif last is not None and entry is None:
                damaged.append(position)
            elif entry is None and position + len(line) < size:
                lost.append(position)
            if last is not None and position < size - CHECKED:
                break
        file.truncate(end)
    if lost:
        log.warning("%s: lines from byte %d on that can't be read are cut: %d", path, lost[-1], len(lost))
    if damaged:
        where = ", ".join(map(str, reversed(damaged)))
        log.warning("%s: the line at byte %s can't be read; left as it is", path, where)
    return last


# Lines ----------------------------------------------------------------------------------------------------------------


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line; None if the line is incomplete or has no step."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


def backwards(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file with their positions, the last one first.

    Reads little more than the lines that are taken.
    """
    at, size = file.seek(0, os.SEEK_END), BLOCK
    held = b""  # the end of a line that begins before `at`
    while at > 0:
        start = max(0, at - size)
        file.seek(start)
        data, at = file.read(at - start) + held, start
        begin = data.find(b"\n") + 1 if at else 0  # of the first line that is whole
        if at and not 0 < begin < len(data):  # none is
            held, size = data, 2 * size
            continue
        position = at + len(data)
        for line in reversed(io.BytesIO(data[begin:]).readlines()):
            position -= len(line)
            yield position, line
        held, size = data[:begin], BLOCK
