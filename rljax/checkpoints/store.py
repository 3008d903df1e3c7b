"""Checkpoints that are whole or not there: written aside, synced, renamed; checked before they are used; kept by policy.

checkpoints/<step>/manifest.json    step, score, size and CRC-32 of every file
                  /loop.json        where the run stands (rljax/loop.py)
                  /ready.journal    finished groups that wait (rljax/rollout/journal.py)
                  /learner/         parameters, moments, step: the learner's own format
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax.errors import UserError

MANIFEST = "manifest.json"
WHOLE_BELOW = 64 << 20  # bytes; of a larger file the checksum covers so much of its beginning and of its end

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One that was whole when it was looked at."""

    path: Path
    step: int
    score: float | None  # eval-rollout/reward when it was made


class Checkpoints:
    """The checkpoints of a run.

    Example:

        checkpoints = Checkpoints(workdir / "checkpoints", keep_last=2)
        checkpoints.save(100, write, score=0.8)       # write(directory) fills it
        newest = next(checkpoints.whole(), None)
    """

    def __init__(self, directory: Path, keep_last: int) -> None:
        self._directory = directory
        self._keep_last = keep_last

    def save(self, step: int, write: Callable[[Path], None], *, score: float | None = None, failed: bool = False) -> None:
        """Makes a checkpoint, then deletes those that need not be kept: all but the last few and the best.

        Args:
          write: fills a directory that exists and is empty.
          failed: the run ends here by a fault; kept beside the others as <step>-failed, in place of an older such, and never
            resumed from.

        Raises:
          UserError: the disk is full or can't be written. The checkpoints there were are untouched.
        """
        name = f"{step}-failed" if failed else str(step)
        aside = self._directory / f".{name}.tmp"
        try:
            self._clear_leftovers()
            aside.mkdir(parents=True)
            write(aside)
            (aside / MANIFEST).write_text(json.dumps({"step": step, "score": score, "files": _summary(aside)}))
            _sync_tree(aside)
            for old in (*self._directory.glob("*-failed"),) if failed else (self._directory / name,):
                self._delete(old)
            os.rename(aside, self._directory / name)
            _sync(self._directory)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            cause = _disk_error(error)
            if cause is None:
                raise
            raise UserError(
                f"checkpoints: cannot write step {step}: {cause.strerror or cause} ({_free_mb(self._directory)} MB free"
                f" in {self._directory}; make room, or lower saver.keep_last); the checkpoints before it are whole"
            ) from error
        if not failed:
            self._prune(step)

    def steps(self) -> list[int]:
        """Of the checkpoints there are, whole or not, ascending."""
        if not self._directory.is_dir():
            return []
        return sorted(int(p.name) for p in self._directory.iterdir() if p.name.isdigit())

    def whole(self) -> Iterator[Checkpoint]:
        """Newest first. One that is torn or corrupt is passed over with a warning."""
        for step in reversed(self.steps()):
            path = self._directory / str(step)
            try:
                manifest = json.loads((path / MANIFEST).read_text())
                _check(path, manifest["files"])
                yield Checkpoint(path, step, manifest["score"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("checkpoint %s is not whole and is passed over: %s", path, error)

    def _prune(self, newest: int) -> None:
        scores = {step: self._score(step) for step in self.steps() if step <= newest}
        best = max((s for s in scores if scores[s] is not None), key=lambda s: (scores[s], s), default=None)
        keep = {*sorted(scores)[-self._keep_last :], best}
        for step in self.steps():
            if step not in keep:
                self._delete(self._directory / str(step))

    def _score(self, step: int) -> float | None:
        try:
            return json.loads((self._directory / str(step) / MANIFEST).read_text())["score"]
        except (OSError, ValueError, KeyError):
            return None  # not whole: nothing to be best at

    def _delete(self, path: Path) -> None:
        """Renames first, so that a kill leaves no half-deleted checkpoint under its name."""
        if path.exists():
            trash = self._directory / f".{path.name}.trash"
            os.rename(path, trash)
            shutil.rmtree(trash)

    def _clear_leftovers(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            if path.name.startswith(".") and path.suffix in (".tmp", ".trash"):
                shutil.rmtree(path)


def _summary(directory: Path) -> dict[str, tuple[int, int]]:
    """Size in bytes and checksum of every file under directory, by relative path."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {p.relative_to(directory).as_posix(): (p.stat().st_size, _checksum(p)) for p in files}


def _check(directory: Path, files: dict[str, tuple[int, int]]) -> None:
    for name, (size, checksum) in files.items():
        path = directory / name
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, not {size}")
        if _checksum(path) != checksum:
            raise ValueError(f"{name} does not match its checksum")


def _checksum(path: Path) -> int:
    size, total = path.stat().st_size, 0
    with path.open("rb") as file:
        spans = [(0, size)] if size <= 2 * WHOLE_BELOW else [(0, WHOLE_BELOW), (size - WHOLE_BELOW, size)]
        for start, end in spans:
            file.seek(start)
            for at in range(start, end, 1 << 20):
                total = zlib.crc32(file.read(min(1 << 20, end - at)), total)
    return total


def _sync_tree(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_error(error: BaseException | None) -> OSError | None:
    """The operating system's error behind an exception: frameworks wrap it."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _free_mb(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free >> 20
