"""Store of checkpoints: written to a temporary directory, synced, renamed; checked before use.

checkpoints/<step>/manifest.json    step, score, sizes and checksums of the files (integrity.py)
                  /loop.json        state of the loop and the buffer (rljax/loop.py)
                  /ready.journal    groups that wait for the learner (rljax/rollout/journal.py)
                  /learner/         parameters, moments, step, in the learner's own format
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from rljax.checkpoints.disk import free_mb, os_error_behind, sync, sync_tree
from rljax.checkpoints.integrity import Corrupt, check, read_manifest, rescore, write_manifest
from rljax.errors import UserError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files matched its manifest."""

    path: Path
    step: int
    score: float | None  # by the metric of evaluator.best, else eval-rollout/reward, if it was evaluated


class Checkpoints:
    """Checkpoints of a run.

    Example:

        checkpoints = Checkpoints(workdir / "checkpoints", keep_last=2)
        checkpoints.save(100, write, score=0.8)       # write(directory) fills it
        newest = next(checkpoints.intact(), None)
    """

    def __init__(self, directory: Path, keep_last: int) -> None:
        self._directory = directory
        self._keep_last = keep_last
        self.held: Callable[[], Collection[int]] = tuple  # steps whose checkpoints are kept beside the last and the best

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        score: float | None = None,
        failed: bool = False,
        keep_from: int | None = None,
    ) -> None:
        """Makes a checkpoint; deletes all but the last `keep_last`, the best, and those held.

        Args:
          step: finished steps.
          write: fills an empty directory.
          score: evaluation reward at this step; the best checkpoint has the highest.
          failed: the run ends here because of a failure. The checkpoint is named <step>-failed,
            replaces an older failed one, and is never resumed from.
          keep_from: checkpoints from this step on are kept, to roll back to; None for none.

        Raises:
          UserError: the disk is full or can't be written. Earlier checkpoints are unchanged.
        """
        name = f"{step}-failed" if failed else str(step)
        temporary = self._directory / f".{name}.tmp"
        try:
            self._delete_leftovers()
            temporary.mkdir(parents=True)
            write(temporary)
            write_manifest(temporary, {"step": step, "score": score})
            sync_tree(temporary)
            for old in (*self._directory.glob("*-failed"),) if failed else (self._directory / name,):
                self._delete(old)
            os.rename(temporary, self._directory / name)
            sync(self._directory)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            cause = os_error_behind(error)
            if cause is None:
                raise
            raise UserError(
                f"checkpoints: cannot write step {step}: {cause.strerror or cause} ({free_mb(self._directory)} MB free"
                f" in {self._directory}; make room, or lower saver.keep_last); the checkpoints before it are whole"
            ) from error
        if not failed:
            self._prune(step, keep_from)

    def set_score(self, step: int, score: float) -> None:
        """Sets the score of a checkpoint, if it is there and intact."""
        path = self._directory / str(step)
        try:
            rescore(path, score)
        except (Corrupt, OSError) as error:
            log.warning("checkpoint %s: its score is not recorded: %s", path, error)

    def best(self) -> Checkpoint | None:
        """Returns the intact checkpoint with the highest score, the newest of equals.

        None if none has a score.
        """
        scored = [checkpoint for checkpoint in self.intact() if checkpoint.score is not None]
        return max(scored, key=lambda checkpoint: (checkpoint.score, checkpoint.step), default=None)

    def delete(self, steps: Iterable[int]) -> None:
        """Deletes the checkpoints of these steps."""
        for step in steps:
            self._delete(self._directory / str(step))

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, intact or not, ascending."""
        if not self._directory.is_dir():
            return []
        return sorted(int(p.name) for p in self._directory.iterdir() if p.name.isdigit())

    def intact(self) -> Iterator[Checkpoint]:
        """Yields the intact checkpoints, newest first. Warns of each that is skipped.

        A learner verifies the arrays in its own directory before it reads them (integrity.py).
        """
        for step in reversed(self.steps()):
            path = self._directory / str(step)
            try:
                manifest = read_manifest(path)
                check(path, manifest["files"])
                yield Checkpoint(path, step, manifest["score"])
            except (Corrupt, OSError, ValueError, TypeError) as error:
                log.warning("checkpoint %s is not intact and is skipped: %s", path, error)

    def _prune(self, newest: int, keep_from: int | None) -> None:
        scores = {step: self._score(step) for step in self.steps() if step <= newest}
        best = max((s for s in scores if scores[s] is not None), key=lambda s: (scores[s], s), default=None)
        keep = {*sorted(scores)[-self._keep_last :], best, *self.held()}
        if keep_from is not None:
            keep |= {step for step in scores if step >= keep_from}
        for step in self.steps():
            if step not in keep:
                self._delete(self._directory / str(step))

    def _score(self, step: int) -> float | None:
        try:
            return read_manifest(self._directory / str(step))["score"]
        except Corrupt:
            return None  # not intact, so it can't be the best

    def _delete(self, path: Path) -> None:
        """Renames a checkpoint, then deletes it, so that a kill leaves no part of it in place."""
        if path.exists():
            trash = self._directory / f".{path.name}.trash"
            os.rename(path, trash)
            shutil.rmtree(trash)

    def _delete_leftovers(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for path in self._directory.iterdir():
            if path.name.startswith(".") and path.suffix in (".tmp", ".trash"):
                shutil.rmtree(path)
