"""Checkpoints that are whole or not there: written aside, synced, renamed; checked before they are
used; kept by policy.

checkpoints/<step>/manifest.json    step, score, and what the files are (integrity.py)
                  /loop.json        where the run stands (rljax/loop.py)
                  /ready.journal    finished groups that wait (rljax/rollout/journal.py)
                  /learner/         parameters, moments, step: the learner's own format
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax.checkpoints.disk import free_mb, os_error_behind, sync, sync_tree
from rljax.checkpoints.integrity import Corrupt, check, read_manifest, write_manifest
from rljax.errors import UserError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest agreed with its files when it was read."""

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
        """Makes a checkpoint, then deletes those that need not be kept: all but the last few and
        the best.

        Args:
          write: fills a directory that exists and is empty.
          failed: the run ends here by a fault; kept beside the others as <step>-failed, in place
            of an older such, and never resumed from.

        Raises:
          UserError: the disk is full or can't be written. The checkpoints there were are
            untouched.
        """
        name = f"{step}-failed" if failed else str(step)
        aside = self._directory / f".{name}.tmp"
        try:
            self._clear_leftovers()
            aside.mkdir(parents=True)
            write(aside)
            write_manifest(aside, {"step": step, "score": score})
            sync_tree(aside)
            for old in (*self._directory.glob("*-failed"),) if failed else (self._directory / name,):
                self._delete(old)
            os.rename(aside, self._directory / name)
            sync(self._directory)
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)
            cause = os_error_behind(error)
            if cause is None:
                raise
            raise UserError(
                f"checkpoints: cannot write step {step}: {cause.strerror or cause} ({free_mb(self._directory)} MB free"
                f" in {self._directory}; make room, or lower saver.keep_last); the checkpoints before it are whole"
            ) from error
        if not failed:
            self._prune(step)

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints there are, whole or not, ascending."""
        if not self._directory.is_dir():
            return []
        return sorted(int(p.name) for p in self._directory.iterdir() if p.name.isdigit())

    def whole(self) -> Iterator[Checkpoint]:
        """Yields checkpoints, newest first. One that is torn or corrupt is passed over with a
        warning.

        A learner verifies the arrays that its directory records itself, before it reads them
        (integrity.py).
        """
        for step in reversed(self.steps()):
            path = self._directory / str(step)
            try:
                manifest = read_manifest(path)
                check(path, manifest["files"])
                yield Checkpoint(path, step, manifest["score"])
            except (Corrupt, OSError, ValueError, TypeError) as error:
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
            return read_manifest(self._directory / str(step))["score"]
        except Corrupt:
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
