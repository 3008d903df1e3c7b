"""Saves and resumes a run: learner, buffer and loop, in checkpoints and journals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from rljax.checkpoints.loop_state import LoopState, Saved
from rljax.checkpoints.store import Checkpoint, Checkpoints, Draft
from rljax.config.schema import Config
from rljax.engine import Learner
from rljax.errors import UserError
from rljax.metrics.mean import Mean
from rljax.rollout.buffer import Buffer, Entry
from rljax.rollout.journal import Journals, Record, read_entries, write_entries

log = logging.getLogger(__name__)


def require_checkpoints(workdir: Path, step: int) -> None:
    """Checks that a run which goes on has not lost its checkpoints: none starts over unasked.

    A run that was killed before its first save does: one line says which steps are done again.

    Args:
      step: finished steps of the run in `workdir`; 0 of a new one.

    Raises:
      UserError: the run had saved a checkpoint and there is none, or its journals, which would say
        so, are gone too; or `checkpoints` is no directory.
    """
    directory = workdir / "checkpoints"
    if os.path.lexists(directory) and not directory.is_dir():
        raise UserError(f"checkpoints: {directory} is no directory (move it away, and put the run's checkpoints there)")
    if Checkpoints(directory, 1).steps():
        return
    journals = Journals(workdir / "journal").steps()
    if 0 not in journals and (journals or step):
        known = f"saved one at step {max(journals)}" if journals else f"has made {step} steps, and journal/ is gone too"
        raise UserError(
            f"checkpoints: none in {directory}, though the run {known} (put it back; another --workdir, or this one"
            f" without its files, to start over)"
        )
    if step:
        log.warning("no checkpoint had been saved yet: steps 1-%d are done again", step)


@dataclasses.dataclass(frozen=True)
class _Content:
    """Files of a checkpoint beside the learner's, as the run was at one instant."""

    text: str  # loop.json
    entries: Sequence[Entry]  # groups that wait for the learner

    def write(self, directory: Path) -> None:
        (directory / "loop.json").write_text(self.text)
        write_entries(directory / "ready.journal", self.entries)


@dataclasses.dataclass
class Recovery:
    """Checkpoints and journals of a run.

    A save goes on beside the following steps, one at a time. Until its checkpoint is whole, the one
    before it and its journal stay as they are, and a killed run goes on from those.

        who                    waits for
        the step that saves    the save before it; the learner to begin (not to copy its state)
        the next update        the copy of the learner's state (`Learner.begin_save`)
        a roll-back, the end   the save that goes on: `settle`

    Example:

        state, recovered = await recovery.restore()     # (None, {}) in a new run
        await recovery.save(step, state)                # goes on beside what follows
        recovery.check()                                # raises the error of a save that has failed
        await recovery.settle()                         # the newest checkpoint is whole
    """

    config: Config
    workdir: Path
    learner: Learner
    buffer: Buffer

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.workdir / "checkpoints", self.config.saver.keep_last)
        self.journals = Journals(self.workdir / "journal")
        self.saving: asyncio.Task[None] | None = None  # the save that goes on, or one that has ended and was not checked
        self._saved: int | None = None  # step of the newest checkpoint of this run that is whole
        self._seconds: list[float] = []  # that saves took, since the last `take_metrics`

    async def save(
        self,
        step: int,
        state: LoopState,
        *,
        score: float | None = None,
        failed: bool = False,
        keep_from: int | None = None,
        wait: bool = False,
    ) -> None:
        """Saves the run as it is when no save before this one goes on any more (`settle`).

        Call it while nothing else uses the learner. Groups that finish during the write go to the
        new journal, and to that of the checkpoint before.

        Args:
          step: finished steps.
          score: of the evaluation at this step, if there is one.
          failed: the run ends here, or rolls back, because of a failure; see `Checkpoints.begin`.
          keep_from: checkpoints from this step on are kept.
          wait: return when the checkpoint is whole. So it is if it failed, or the config says so.

        Raises:
          UserError: the disk is full or can't be written, now or for the save before.
        """
        await self.settle()
        if step == self._saved and not failed:
            if score is not None:
                await asyncio.to_thread(self.checkpoints.set_score, step, score)
            return
        began, draft = time.perf_counter(), self.checkpoints.draft(step, failed=failed)
        whole = wait or failed or not self.config.saver.background
        # Encoded now, in the event loop's thread: the producer changes the state during the write.
        entries = self.buffer.entries()
        content = _Content(Saved(state, self.buffer.state(), len(entries)).to_json(), entries)
        with self._abandoning(draft):
            undone: list[Path] = []
            if not failed:
                undone = self.checkpoints.take_away([step])  # of steps that were undone: the new journal isn't its
                self.journals.begin_beside(step, self.buffer.version)

            def begin() -> Future[None] | None:
                self.checkpoints.purge(undone)
                draft.begin()
                directory = draft.path / "learner"
                if not whole:
                    return self.learner.begin_save(directory)
                self.learner.save(directory)
                return None

            learned = await asyncio.to_thread(begin)
        self.saving = asyncio.create_task(self._finish(draft, content, learned, score, keep_from, began), name="save")
        if whole:
            await self.settle()

    @contextlib.contextmanager
    def _abandoning(self, draft: Draft) -> Iterator[None]:
        """Deletes a checkpoint that can't be made, and its journal."""
        with draft.discarded_on_error():
            try:
                yield
            except Exception:
                if not draft.failed:
                    self.journals.abandon(draft.step)
                raise

    async def _finish(
        self, draft: Draft, content: _Content, learned: Future[None] | None, score: float | None, keep_from: int | None,
        began: float,
    ) -> None:  # fmt: skip
        """Ends a save: the other files, what the learner still writes, and the rename."""

        def write() -> None:
            try:
                content.write(draft.path)
            finally:
                if learned is not None:
                    learned.result()  # waited for even after an error: it writes to this directory
            draft.finish(score)

        with self._abandoning(draft):
            await asyncio.to_thread(write)
        self._seconds.append(time.perf_counter() - began)
        if draft.failed:
            return
        # In one go, in the event loop's thread: nobody there chooses a checkpoint that is on its way out.
        self._saved = draft.step
        self.journals.settle(draft.step)
        trash = self.checkpoints.retire(draft.step, keep_from)
        self.journals.prune(self.checkpoints.steps())
        await asyncio.to_thread(self.checkpoints.purge, trash)

    def check(self) -> None:
        """Raises the error of a save that went on beside the steps, if it has failed."""
        if self.saving is not None and self.saving.done():
            saving, self.saving = self.saving, None
            saving.result()

    async def settle(self) -> None:
        """Waits for the save that goes on, if there is one. Raises its error."""
        if self.saving is not None:
            await asyncio.wait([self.saving])
            self.check()

    def take_metrics(self) -> dict[str, Mean]:
        """Returns how long the saves took that have ended since the last call."""
        seconds, self._seconds = self._seconds, []
        return {"timeperf/save_background": Mean(sum(seconds), 1)} if seconds else {}

    async def restore(self) -> tuple[LoopState | None, dict[tuple[str, int], Record]]:
        """Resumes from the newest checkpoint that is intact and loads, or begins a new run.

        Returns:
          The loop's own state, None in a new run; and the groups that were finished after the
          checkpoint and can be used, by uid and attempt.

        Raises:
          UserError: there are checkpoints but none loads, or recover.mode is "fresh".
        """
        if self.config.recover.mode == "fresh" and self.checkpoints.steps():
            raise UserError(f"recover.mode: fresh, but {self.workdir} holds a run (another --workdir, or recover.mode=auto)")
        found = await asyncio.to_thread(self._load)
        if found is None:
            return None, self.journals.begin(0, 0)
        checkpoint, saved, entries = found
        self.buffer.restore(saved.book, entries)
        self._saved = checkpoint.step
        recovered = self.journals.begin(checkpoint.step, self.buffer.version)
        log.info(
            "going on from step %d: %d groups wait, %d finished since can be used, %d prompts are generated again",
            checkpoint.step, len(entries), len(recovered), len(saved.book["pending"]),
        )  # fmt: skip
        return saved.loop, recovered

    async def roll_back(self, steps: Collection[int], last: int) -> tuple[int, Saved, list[Entry]]:
        """Restores the learner from the newest of some checkpoints that is not after step `last`.

        If there is none, from the oldest of them. Call it while nothing else uses the learner.
        The buffer and the journal stay: call `Buffer.roll_back` with what is returned, and `save`.

        Returns:
          The checkpoint's step, the state of loop and buffer, and the groups that were ready.

        Raises:
          UserError: none of these checkpoints loads.
        """
        usable = [step for step in steps if step <= last] or sorted(steps)[:1]
        found = await asyncio.to_thread(self._load, usable)
        if found is None:
            raise UserError(f"guard: no checkpoint in {self.workdir / 'checkpoints'} to roll back to")
        checkpoint, saved, entries = found
        return checkpoint.step, saved, entries

    def _load(self, usable: Collection[int] | None = None) -> tuple[Checkpoint, Saved, list[Entry]] | None:
        """Restores the learner from the newest checkpoint that loads.

        Args:
          usable: the steps of the checkpoints to try; None for all.

        Returns the checkpoint, the state of loop and buffer, and the buffer's entries; None without
        checkpoints.
        """
        first_error: Exception | None = None
        for checkpoint in self.checkpoints.intact():
            if usable is not None and checkpoint.step not in usable:
                continue
            try:
                saved = Saved.read(checkpoint.path / "loop.json")
                entries = read_entries(checkpoint.path / "ready.journal", saved.ready)
                self.learner.restore(checkpoint.path / "learner")
                return checkpoint, saved, entries
            except (OSError, ValueError, KeyError, UserError) as error:
                log.warning("checkpoint %s does not load and is skipped: %s", checkpoint.path, error)
                first_error = first_error or error
        if self.checkpoints.steps():
            reason = f": {first_error}" if first_error else ""
            raise UserError(
                f"checkpoints: none of those in {self.workdir / 'checkpoints'} loads{reason} (another --workdir to start over)"
            ) from first_error
        return None

    def resume_hint(self, step: int) -> str:
        """Returns, for a run that ends at a step, where the same command goes on from."""
        steps, failed = self.checkpoints.steps(), self.workdir / "checkpoints" / f"{step}-failed"
        kept = f"the state is kept in {failed}, and " if failed.exists() else ""
        return f"{kept}the same command goes on from step {steps[-1]}" if steps else f"{kept}the same command starts over"

    async def close(self) -> None:
        """Waits for the save that goes on, and closes the journals.

        An error of that save is logged: a run that ends without an error has settled before.
        """
        try:
            await self.settle()
        except Exception as error:
            log.warning("%s", error)
        finally:
            self.journals.close()
