"""Oversight of a run: what guardrails and the live doctor say of a step, and what is kept of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rljax.checkpoints.store import Checkpoints
from rljax.config.schema import Config
from rljax.diagnosis import Severity
from rljax.errors import GuardrailError
from rljax.flight.recorder import Recorder
from rljax.metrics.guard_actions import Decision, GuardActions
from rljax.metrics.guardrails import Event, Guardrails, in_order
from rljax.metrics.mean import Mean
from rljax.run.verdicts import Verdicts
from rljax.sinks import Sink

log = logging.getLogger(__name__)


class Oversight:
    """Guardrails, their actions so far, the live doctor and the flight recorder, as the loop uses
    them.

    It decides; the loop acts.

    Example:

        for decision in oversight.decide(step, metrics, supervised=False):
            ...                                                    # what it says
            oversight.record(decision.breach.event(step, decision.action, ""))
    """

    def __init__(self, config: Config, checkpoints: Checkpoints) -> None:
        self.guardrails = Guardrails(config.guard, config.gconfig.n_samples)
        self.actions = GuardActions(config)
        self._config, self._checkpoints = config, checkpoints
        self._warned: set[tuple[str, str]] = set()  # guards and their actions within updates
        self._flight: Recorder | None = None

    def open(self, workdir: Path, sinks: Sink, first_step: int) -> None:
        """Starts the live doctor and the flight recorder.

        Raises UserError for rules that can't be loaded.
        """
        self._sinks = sinks
        self.verdicts = Verdicts(self._config, workdir, first_step)
        self._flight = flight = Recorder(self._config, workdir, first_step=first_step)
        self._checkpoints.held = lambda: flight.held

    def close(self) -> None:
        """Waits until the recorder has written what it holds. May be called without `open`."""
        if self._flight is not None:
            self._flight.close()

    @property
    def flight(self) -> Recorder:
        assert self._flight is not None, "not open"
        return self._flight

    def decide(self, step: int, metrics: Mapping[str, Mean], *, supervised: bool) -> list[Decision]:
        """Judges the metrics of a step, and keeps its batch where the doctor speaks.

        Returns what to do, up to the first action that ends or undoes steps.
        """
        if line := self.guardrails.hint(metrics):
            log.warning("%s", line)
        self.verdicts.write(step, metrics)
        for finding in self.verdicts.news():
            self._keep_batch(finding.step, f"{finding.rule}: {finding.evidence[0]}", alone=finding.severity < Severity.BROKEN)
        breaches = in_order([*self.guardrails.check(step, metrics), *self.verdicts.breaches()])
        return self.actions.decide(breaches, supervised=supervised)

    def record(self, event: Event, trusted: int | None = None) -> None:
        """Tells sinks and doctor of an action of a guardrail, and keeps the step's batch.

        Args:
          trusted: step up to which checkpoints stay; None if all do.
        """
        self._keep_batch(event.step, str(event), trusted=trusted)
        self._sinks.event(event)
        self.verdicts.event(event)

    def record_of_update(self, event: Event) -> None:
        """Records an action within an update, and warns of its kind the first time in this process."""
        if (event.guard, event.action) not in self._warned:
            self._warned.add((event.guard, event.action))
            found = f"guard.{event.guard}: {event.metric} is {event.value:.4g} in {event.detail} of step {event.step}"
            log.warning("%s: %s (guard.jsonl has all of these; this is said once)", found, event.action)
        self.record(event)

    def forget(self, target: int) -> None:
        """Forgets what was seen of the steps after `target`, which a rollback undid."""
        self.guardrails.reset()
        self.verdicts.roll_back(target)

    def check_end(self, step: int) -> None:
        """Checks the last metrics of the supervised steps, or of the run. Raises GuardrailError."""
        if (breach := self.guardrails.check_end(step)) is not None:
            self.record(breach.event(step, "stop", "at the end"))
            raise GuardrailError(f"guard.{breach.guard}: {breach.line} ({breach.remedy})")

    def is_suspect(self, step: int) -> bool:
        """Returns whether a metric is out of bounds now, so that no checkpoint should be made."""
        if line := self.guardrails.suspect:
            log.warning("step %d is not saved: %s (guard)", step, line)
        return bool(line)

    def _keep_batch(self, step: int, why: str, *, trusted: int | None = None, alone: bool = False) -> None:
        """Keeps the batch of a step at which a guardrail or a rule spoke.

        Args:
          trusted: step up to which checkpoints stay; None if all do.
          alone: don't keep a checkpoint and the batches after it, to make the step again.
        """
        checkpoints = [s for s in self._checkpoints.steps() if trusted is None or s <= trusted]
        self.flight.keep(step, why, checkpoints=None if alone else checkpoints)


def counted(actions: Iterable[str]) -> dict[str, Mean]:
    """Counts actions of the guardrails, as metrics of a step."""
    return {f"guard/{action}": Mean(count, 1) for action, count in Counter(actions).items()}
