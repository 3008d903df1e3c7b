"""End of a run: what is exported, what is said, and whether it did what it was asked to."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil

from rljax.checkpoints.recovery import Recovery
from rljax.engine import ExportToDirectory
from rljax.errors import IncompleteRun
from rljax.hf.turn_ends import write_turn_ends
from rljax.rollout.buffer import Buffer
from rljax.rollout.limits import failed_at_the_end, shortfall
from rljax.rollout.result import Failure
from rljax.run.oversight import Oversight
from rljax.run.parts import Run
from rljax.run.reporting import Reporter
from rljax.sinks import RunState

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Ending:
    """End of a run that no signal and no error stopped.

    Example:

        if ending.was_reached(supervised_done=True):
            ending.say_nothing_to_do(step)
            return
        ...
        await ending.export(step)
        ending.conclude(step, sampling.first_failure)
    """

    run: Run
    buffer: Buffer
    recovery: Recovery
    oversight: Oversight
    reporter: Reporter

    def was_reached(self, *, supervised_done: bool) -> bool:
        """Returns whether the run had ended before, and the config asks for no more."""
        config = self.run.config
        over = supervised_done and (config.actor.loss == "sft" or self.buffer.over)
        return self.run.before is not None and self.run.before.has_ended and over and not self._missing_exports()

    def was_incomplete(self) -> bool:
        """Returns whether the checkpoint is of a run that ended far from what it was asked to do."""
        if self.run.before is not None and self.run.before.state is RunState.INCOMPLETE:
            return True
        return self.buffer.over and shortfall(self.buffer)[1]  # a later command may have failed at its start

    def _missing_exports(self) -> list[str]:
        config = self.run.config
        has_best = config.evaluator.best is not None and self.recovery.checkpoints.best() is not None
        wanted = [*(["export"] if config.saver.export_final else []), *(["best"] if has_best else [])]
        return [name for name in wanted if not (self.run.workdir / name).exists()]

    def say_nothing_to_do(self, step: int) -> None:
        """Says that the run had ended. Raises IncompleteRun as `conclude` does."""
        self.conclude(
            step, None, "nothing to do: the run ended at step %d (a larger total_train_steps or total_train_epochs go on)"
        )

    async def export(self, step: int) -> None:
        """Exports the last weights and the best ones, as the config says; without a step nothing."""
        if self.oversight.guardrails.idle:
            log.warning("the run ends with steps from which nothing was learned (rollout/reward, rollout/equal_reward_groups)")
        if step and self.run.config.saver.export_final:
            await asyncio.to_thread(self.export_to, "export")
        if self.run.config.evaluator.best is not None:
            await asyncio.to_thread(self._export_best, step)

    def conclude(self, step: int, failure: Failure | None, line: str = "finished at step %d") -> None:
        """Says how the run ended and writes its status.

        Args:
          failure: the first of a whole group, if any failed.
          line: what is said of a run that did what it was asked to.

        Raises:
          IncompleteRun: it did far less.
        """
        missing, is_incomplete = ("", False) if self.run.config.actor.loss == "sft" else shortfall(self.buffer)
        if not is_incomplete:
            if step > (asked := self.reporter.total_steps):
                line = f"the run already has %d steps, more than the {asked} of total_train_steps or _epochs"
            log.info(line + "%s", step, f"; {missing}" if missing else "")
            self.reporter.status(step, RunState.FINISHED)
            return
        first = f"the first failure: {failure.reason}; " if failure else ""
        remedy = self._remedy()
        error = f"incomplete at step {step}: {missing} ({first}{remedy})"
        self.reporter.status(step, RunState.INCOMPLETE, error)
        raise IncompleteRun(error)

    def _remedy(self) -> str:
        if failed_at_the_end(self.buffer):
            return "the same command tries these again"
        return "more prompts or total_train_epochs, fewer total_train_steps, or another filter, workflow or reward"

    def export_to(self, name: str) -> None:
        """Exports the policy to a directory of the run as a HF directory, whole or not at all."""
        target = self.run.workdir / name
        temporary = target.with_name(f".{target.name}.tmp")
        target.parent.mkdir(exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        self.run.engine.learner.export(ExportToDirectory(temporary))
        write_turn_ends(temporary, self.run.params.stop_token_ids)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)

    def _export_best(self, step: int) -> None:
        """Exports the best checkpoint to WORKDIR/best. The learner has its weights afterwards."""
        best = self.recovery.checkpoints.best()
        if best is None:
            log.warning("evaluator.best: no checkpoint has a score, so there is none to export")
            return
        if best.step != step:
            self.run.engine.learner.restore(best.path / "learner")
        self.export_to("best")
        log.info("%s: step %d, %s %.4g", self.run.workdir / "best", best.step, self.run.config.evaluator.best, best.score)
