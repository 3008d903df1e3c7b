"""Saves and resumes a run: learner, buffer and loop, in checkpoints and journals."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rljax.checkpoints import loop_state
from rljax.checkpoints.store import Checkpoint, Checkpoints
from rljax.config.schema import Config
from rljax.engine import Learner
from rljax.errors import UserError
from rljax.rollout.buffer import Buffer, Entry
from rljax.rollout.journal import Journals, Record, read_entries, write_entries

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Recovery:
    """Checkpoints and journals of a run.

    Example:

        state, recovered = await recovery.restore()     # (None, {}) in a new run
        await recovery.save(step, state)
    """

    config: Config
    workdir: Path
    learner: Learner
    buffer: Buffer

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.workdir / "checkpoints", self.config.saver.keep_last)
        self.journals = Journals(self.workdir / "journal")
        self._saved: int | None = None  # step of the checkpoint that the journal belongs to

    async def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        score: float | None = None,
        failed: bool = False,
        keep_from: int | None = None,
    ) -> None:
        """Saves the run as it is now. Groups that finish during the write go to the new journal.

        Args:
          step: finished steps.
          state: the loop's own state, as JSON values.
          score: of the evaluation at this step, if there is one.
          failed: the run ends here, or rolls back, because of a failure; see `Checkpoints.save`.
          keep_from: checkpoints from this step on are kept.

        Raises:
          UserError: the disk is full or can't be written.
        """
        if step == self._saved and not failed:
            if score is not None:
                await asyncio.to_thread(self.checkpoints.set_score, step, score)
            return
        entries = self.buffer.entries()
        # Encoded now, in the event loop's thread: the producer changes the state during the write.
        text = json.dumps(state | {"book": self.buffer.state(), "ready": len(entries)})
        if not failed:
            self.journals.begin(step, self.buffer.version, fresh=True)

        def write(directory: Path) -> None:
            (directory / "loop.json").write_text(text)
            write_entries(directory / "ready.journal", entries)
            self.learner.save(directory / "learner")

        await asyncio.to_thread(self.checkpoints.save, step, write, score=score, failed=failed, keep_from=keep_from)
        if not failed:
            self._saved = step
            self.journals.prune(self.checkpoints.steps())

    async def restore(self) -> tuple[dict[str, Any] | None, dict[tuple[str, int], Record]]:
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
        checkpoint, state, entries = found
        self.buffer.restore(state["book"], entries)
        self._saved = checkpoint.step
        recovered = self.journals.begin(checkpoint.step, self.buffer.version)
        log.info(
            "going on from step %d: %d groups wait, %d finished since can be used, %d prompts are generated again",
            checkpoint.step, len(entries), len(recovered), len(state["book"]["pending"]),
        )  # fmt: skip
        return state, recovered

    async def roll_back(self, steps: Collection[int], last: int) -> tuple[int, dict[str, Any], list[Entry]]:
        """Restores the learner from the newest of some checkpoints that is not after step `last`.

        If there is none, from the oldest of them. Call it while nothing else uses the learner.
        The buffer and the journal stay: call `Buffer.roll_back` with what is returned, and `save`.

        Returns:
          The checkpoint's step, the loop's own state, and the groups that were ready.

        Raises:
          UserError: none of these checkpoints loads.
        """
        usable = [step for step in steps if step <= last] or sorted(steps)[:1]
        found = await asyncio.to_thread(self._load, usable)
        if found is None:
            raise UserError(f"guard: no checkpoint in {self.workdir / 'checkpoints'} to roll back to")
        checkpoint, state, entries = found
        return checkpoint.step, state, entries

    def _load(self, usable: Collection[int] | None = None) -> tuple[Checkpoint, dict[str, Any], list[Entry]] | None:
        """Restores the learner from the newest checkpoint that loads.

        Args:
          usable: the steps of the checkpoints to try; None for all.

        Returns the checkpoint, the loop's state and the buffer's entries; None without checkpoints.
        """
        first_error: Exception | None = None
        for checkpoint in self.checkpoints.intact():
            if usable is not None and checkpoint.step not in usable:
                continue
            try:
                state = loop_state.read(checkpoint.path / "loop.json")
                entries = read_entries(checkpoint.path / "ready.journal", state["ready"])
                self.learner.restore(checkpoint.path / "learner")
                return checkpoint, state, entries
            except (OSError, ValueError, KeyError, UserError) as error:
                log.warning("checkpoint %s does not load and is skipped: %s", checkpoint.path, error)
                first_error = first_error or error
        if self.checkpoints.steps():
            reason = f": {first_error}" if first_error else ""
            raise UserError(
                f"checkpoints: none of those in {self.workdir / 'checkpoints'} loads{reason} (delete them to start over)"
            ) from first_error
        return None

    def resume_hint(self, step: int) -> str:
        """Returns, for a run that ends at a step, where the same command goes on from."""
        steps, failed = self.checkpoints.steps(), self.workdir / "checkpoints" / f"{step}-failed"
        kept = f"the state is kept in {failed}, and " if failed.exists() else ""
        return f"{kept}the same command goes on from step {steps[-1]}" if steps else f"{kept}the same command starts over"

    def close(self) -> None:
        self.journals.close()
