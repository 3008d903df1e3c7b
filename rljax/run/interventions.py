"""Interventions of the guardrails: warn, lower the learning rate, roll back, or end the run.

A rollback restores learner and data position of an older checkpoint, and publishes them as a
version of their own; all prompts since then are drawn again, and everything in flight or ready is
generated again. A version number therefore never comes twice, and no token sampled before a
rollback is trained on after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable
from typing import Protocol

from rljax.checkpoints.recovery import Recovery
from rljax.errors import GuardrailError
from rljax.metrics.guard_actions import Decision
from rljax.metrics.guardrails import Breach
from rljax.rollout.buffer import Buffer
from rljax.run.oversight import Oversight
from rljax.run.parts import Run
from rljax.run.reporting import Reporter
from rljax.run.sampling import Sampling

log = logging.getLogger(__name__)


class Save(Protocol):
    """Saves the run as it is now, `epochs` finished ones for its count of them.

    The checkpoint is whole on return if `wait` or `failed`.
    """

    def __call__(self, epochs: int | None = None, *, failed: bool = False, wait: bool = False) -> Awaitable[None]: ...


@dataclasses.dataclass(frozen=True)
class Interventions:
    """Actions of the guardrails: does what `Oversight` decided, and records it.

    Example:

        for decision in oversight.decide(step, metrics, supervised=False):
            await interventions.act(decision, step)
    """

    run: Run
    buffer: Buffer
    recovery: Recovery
    oversight: Oversight
    sampling: Sampling
    reporter: Reporter
    learner_lock: asyncio.Lock
    save: Save

    async def act(self, decision: Decision, step: int) -> int | None:
        """Does what was decided about a step.

        Returns:
          The number of finished epochs after a rollback, None without one.

        Raises:
          GuardrailError: the run has to end.
        """
        breach, action, reason = decision
        line = f"guard.{breach.guard}: {breach.line} ({breach.remedy})"
        if action == "stop":
            self.oversight.record(breach.event(step, action, reason))
            raise GuardrailError(f"{line}{reason and ', '}{reason}")
        if action == "rollback":
            return await self._roll_back(breach, step)
        detail = ""
        if action == "halve_lr":
            self.oversight.actions.lr_factor /= 2
            async with self.learner_lock:
                await self.scale_lr()
            detail = f"the learning rate is {self.oversight.actions.lr_factor:.4g} of its schedule from now on"
        log.warning("%s%s", line, detail and f"; {detail}")
        self.oversight.record(breach.event(step, action, detail))
        return None

    async def scale_lr(self) -> None:
        """Tells the learner the factor of its learning rates."""
        await asyncio.to_thread(self.run.engine.learner.scale_lr, self.oversight.actions.lr_factor)

    def keep_from(self, step: int) -> int | None:
        """Returns the first step whose checkpoint a rollback after `step` needs; None without any."""
        if not self.run.config.guard.may_roll_back:
            return None
        return self.oversight.actions.oldest_target(step, self._targets(step))

    async def _roll_back(self, breach: Breach, bad: int) -> int:
        """Restores an older checkpoint as a new version, and saves it.

        If the process is killed on the way, the run resumes from the newest checkpoint, and its
        guardrails speak again.
        """
        engine, step = self.run.engine, bad + 1  # a rollback counts as a step
        actions, flight = self.oversight.actions, self.oversight.flight
        await self.save(failed=True)
        await self.sampling.halt()
        async with self.learner_lock:
            async with engine.learning():
                target, saved, entries = await self.recovery.roll_back(self._targets(bad), actions.newest_target(breach))
                actions.rolled_back(step, target)
                await self.scale_lr()
            await engine.publish(self.buffer.version + 1)
            self.sampling.revoke(self.buffer.version + 1)
            self.buffer.roll_back(saved.book, entries)
        self.reporter.forget()
        self.oversight.forget(target)
        self.sampling.resume()
        self._record(breach, bad, target)
        await asyncio.to_thread(flight.rolled_back, step, target)
        await self.save(saved.loop.epochs, wait=True)
        between = [s for s in self.recovery.checkpoints.steps() if target < s < step and s not in flight.held]
        await asyncio.to_thread(self.recovery.checkpoints.delete, between)
        return saved.loop.epochs

    def _record(self, breach: Breach, bad: int, target: int) -> None:
        kept = self.run.workdir / "checkpoints" / f"{bad}-failed"
        rate = f"at {self.oversight.actions.lr_factor:.4g} of the learning rate's schedule"
        detail = f"back to step {target}, {rate}; the state before is in {kept}"
        log.warning("guard.%s: %s (%s): %s", breach.guard, breach.line, breach.remedy, detail)
        self.oversight.record(breach.event(bad, "rollback", detail, restored=target), trusted=target)

    def _targets(self, step: int) -> list[int]:
        """Returns the steps to whose checkpoints it may roll back: RL steps that were not undone."""
        first = step - self.buffer.version  # supervised steps come before
        return [s for s in self.recovery.checkpoints.steps() if s >= first and not self.oversight.actions.was_undone(s)]
