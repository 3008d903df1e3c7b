"""Store of checkpoints: written to a temporary directory, synced, renamed; checked before use.

checkpoints/<step>/manifest.json    step, score, sizes and checksums of the files (integrity.py)
                  /loop.json        state of the loop and the buffer (rljax/loop.py)
                  /ready.journal    groups that wait for the learner (rljax/rollout/journal.py)
                  /learner/         parameters, moments, step, in the learner's own format
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from rljax.checkpoints.disk import free_mb, os_error_behind, sync, sync_tree
from rljax.checkpoints.integrity import Corrupt, check_whole, read_manifest, rescore, write_manifest
from rljax.errors import UserError

_STEP = re.compile("0|[1-9][0-9]*")  # name of a checkpoint

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files matched its manifest."""

    path: Path
    step: int
    score: float | None  # by the metric of evaluator.best, else eval-rollout/reward, if it was evaluated


@dataclasses.dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    No other process sees it, nor does this one when it lists checkpoints, before `finish`.
    """

    directory: Path  # of all checkpoints
    step: int
    failed: bool = False

    @property
    def path(self) -> Path:
        """Directory to fill, after `begin`."""
        return self.directory / f".{self._name}.tmp"

    @property
    def _name(self) -> str:
        return f"{self.step}-failed" if self.failed else str(self.step)

    def begin(self) -> None:
        """Makes the directory, and deletes what a killed process left half written or half deleted."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.iterdir():
            if path.name.startswith(".") and path.suffix in (".tmp", ".trash"):
                _remove(path)
        self.path.mkdir()

    def finish(self, score: float | None) -> None:
        """Makes it a checkpoint: records checksums, syncs, renames. Blocks for the disk."""
        write_manifest(self.path, {"step": self.step, "score": score})
        sync_tree(self.path)
        replaced = (*self.directory.glob("*-failed"),) if self.failed else (self.directory / self._name,)
        trash = [to_trash(path) for path in replaced if os.path.lexists(path)]
        os.rename(self.path, self.directory / self._name)
        sync(self.directory)
        for path in trash:
            _remove(path)

    @contextlib.contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Deletes it if what is done in this context fails.

        Raises UserError for an error of the disk, and any other as it is.
        """
        try:
            yield
        except Exception as error:
            shutil.rmtree(self.path, ignore_errors=True)
            cause = os_error_behind(error)
            if cause is None:
                raise
            raise UserError(
                f"checkpoints: cannot write step {self.step}: {cause.strerror or cause} ({free_mb(self.directory)} MB free"
                f" in {self.directory}; make room, or lower saver.keep_last); the checkpoints before it are whole"
            ) from error


def to_trash(path: Path) -> Path:
    """Renames a checkpoint, so that a kill while it is deleted leaves no part of it in place."""
    trash = path.with_name(f".{path.name}.trash")
    os.rename(path, trash)
    return trash


def _remove(path: Path) -> None:
    """Deletes what has a checkpoint's place; of a link to a directory the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


class Checkpoints:
    """Checkpoints of a run.

    Example:

        checkpoints = Checkpoints(workdir / "checkpoints", keep_last=2)
        checkpoints.save(100, write, score=0.8)       # write(directory) fills it
        newest = next(checkpoints.intact(), None)

    The same in parts, for a save that goes on beside other work:

        draft = checkpoints.draft(100)
        with draft.discarded_on_error():
            draft.begin()
            write(draft.path)
            draft.finish(score=0.8)
        checkpoints.purge(checkpoints.retire(100))
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
        """Makes a checkpoint, and deletes those that are no longer needed; see `retire`.

        Args:
          step: finished steps.
          write: fills an empty directory.
          score: evaluation reward at this step; the best checkpoint has the highest.
          failed: see `draft`.
          keep_from: see `retire`.

        Raises:
          UserError: the disk is full or can't be written. Earlier checkpoints are unchanged.
        """
        draft = self.draft(step, failed=failed)
        with draft.discarded_on_error():
            draft.begin()
            write(draft.path)
            draft.finish(score)
        if not failed:
            self.purge(self.retire(step, keep_from))

    def draft(self, step: int, *, failed: bool = False) -> Draft:
        """Returns a checkpoint to be written; one at a time.

        Args:
          step: finished steps.
          failed: the run ends here because of a failure. The checkpoint is named <step>-failed,
            replaces an older failed one, and is never resumed from.
        """
        return Draft(self._directory, step, failed)

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
        self.purge(self.take_away(steps))

    def take_away(self, steps: Iterable[int]) -> list[Path]:
        """Takes away the checkpoints of these steps. Quick. Returns what to `purge`."""
        there = set(self.steps())
        return [to_trash(self._directory / str(step)) for step in steps if step in there]

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints, intact or not, ascending.

        A file is none, nor is a name that no step has, such as 07.
        """
        if not self._directory.is_dir():
            return []
        return sorted(int(p.name) for p in self._directory.iterdir() if _STEP.fullmatch(p.name) and p.is_dir())

    def intact(self) -> Iterator[Checkpoint]:
        """Yields the intact checkpoints, newest first. Warns of each that is skipped.

        A learner verifies the arrays in its own directory before it reads them (integrity.py).
        """
        for step in reversed(self.steps()):
            path = self._directory / str(step)
            try:
                manifest = check_whole(path)
                yield Checkpoint(path, step, manifest["score"])
            except (Corrupt, OSError, ValueError, TypeError) as error:
                log.warning("checkpoint %s is not intact and is skipped: %s", path, error)

    def retire(self, newest: int, keep_from: int | None = None) -> list[Path]:
        """Takes away all but the last `keep_last`, the best, and those held; nobody sees them then.

        Quick, so that one thread can decide which checkpoints there are.

        Args:
          newest: step of the checkpoint that was just made.
          keep_from: checkpoints from this step on are kept, to roll back to; None for none.

        Returns:
          What to `purge`, which takes longer.
        """
        scores = {step: self._score(step) for step in self.steps() if step <= newest}
        best = max((s for s in scores if scores[s] is not None), key=lambda s: (scores[s], s), default=None)
        keep = {*sorted(scores)[-self._keep_last :], best, *self.held()}
        if keep_from is not None:
            keep |= {step for step in scores if step >= keep_from}
        return self.take_away(step for step in self.steps() if step not in keep)

    def purge(self, trash: Iterable[Path]) -> None:
        """Deletes what was taken away."""
        for path in trash:
            _remove(path)

    def _score(self, step: int) -> float | None:
        try:
            return read_manifest(self._directory / str(step))["score"]
        except Corrupt:
            return None  # not intact, so it can't be the best
