"""Saves a run and resumes it: the learner, the buffer and the rest, in checkpoints and journals."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from rljax.checkpoints.store import Checkpoint, Checkpoints
from rljax.config.schema import Config
from rljax.engine import Learner
from rljax.errors import UserError
from rljax.rollout.buffer import Buffer, Entry
from rljax.rollout.journal import GroupLog, Record, read_entries, write_entries

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Recovery:
    """A run's checkpoints and journals.

    Example:

        state, known = await recovery.restore()         # None, {}: a run that begins
        await recovery.save(step, state)
    """

    config: Config
    workdir: Path
    learner: Learner
    buffer: Buffer

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.workdir / "checkpoints", self.config.saver.keep_last)
        self.journals = GroupLog(self.workdir / "journal")
        self._saved: int | None = None  # step of the checkpoint that the journal belongs to

    async def save(self, step: int, state: dict[str, Any], *, score: float | None = None, failed: bool = False) -> None:
        """Saves the run as it is at this call; what happens during the write belongs to the next
        journal.

        Args:
          state: JSON values of the loop's own.

        Raises:
          UserError: the disk is full or can't be written.
        """
        if step == self._saved and not failed:
            return
        entries = self.buffer.entries()
        # Text now, in the event loop's thread: the producer goes on beside the write and changes what these are made of.
        text = json.dumps(state | {"book": self.buffer.state(), "ready": len(entries)})
        if not failed:
            self.journals.begin(step, self.buffer.version, fresh=True)

        def write(directory: Path) -> None:
            (directory / "loop.json").write_text(text)
            write_entries(directory / "ready.journal", entries)
            self.learner.save(directory / "learner")

        await asyncio.to_thread(self.checkpoints.save, step, write, score=score, failed=failed)
        if not failed:
            self._saved = step
            self.journals.forget(self.checkpoints.steps())

    async def restore(self) -> tuple[dict[str, Any] | None, dict[tuple[str, int], Record]]:
        """Resumes from the newest checkpoint that is whole and loads; a run without one begins.

        Returns:
          The loop's own state, None for a run that begins; the groups that were finished after it
          and still count.

        Raises:
          UserError: there are checkpoints and none loads, or recover.mode forbids to go on.
        """
        if self.config.recover.mode == "fresh" and self.checkpoints.steps():
            raise UserError(f"recover.mode: fresh, but {self.workdir} holds a run (another --workdir, or recover.mode=auto)")
        found = await asyncio.to_thread(self._load)
        if found is None:
            return None, self.journals.begin(0, 0)
        checkpoint, state, entries = found
        self.buffer.restore(state["book"], entries)
        self._saved = checkpoint.step
        known = self.journals.begin(checkpoint.step, self.buffer.version)
        log.info(
            "going on from step %d: %d groups wait, %d finished since can be used, %d prompts are generated again",
            checkpoint.step, len(entries), len(known), len(state["book"]["pending"]),
        )  # fmt: skip
        return state, known

    def _load(self) -> tuple[Checkpoint, dict[str, Any], list[Entry]] | None:
        """Restores the learner from the newest checkpoint that loads, and returns it with the
        rest.

        None if there is none.
        """
        first_error: Exception | None = None
        for checkpoint in self.checkpoints.whole():
            try:
                state = json.loads((checkpoint.path / "loop.json").read_text())
                entries = read_entries(checkpoint.path / "ready.journal", state["ready"])
                self.learner.restore(checkpoint.path / "learner")
                return checkpoint, state, entries
            except (OSError, ValueError, KeyError, UserError) as error:
                log.warning("checkpoint %s does not load and is passed over: %s", checkpoint.path, error)
                first_error = first_error or error
        if self.checkpoints.steps():
            reason = f": {first_error}" if first_error else ""
            raise UserError(
                f"checkpoints: none of those in {self.workdir / 'checkpoints'} loads{reason} (delete them to start over)"
            ) from first_error
        return None

    def close(self) -> None:
        self.journals.close()
