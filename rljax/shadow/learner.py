"""The learner of a run with a shadow: hands over every so many batches, and reports differences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rljax.batching.batch import Batch
from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import Learner
from rljax.engine.plugins import find_plugin
from rljax.errors import UserError
from rljax.metrics.mean import Mean
from rljax.shadow.differences import Computed, compare
from rljax.shadow.process import LEARNER, Answer, ShadowProcess

MOST_DROPPED = 10  # batches in a row that are dropped before it is told

log = logging.getLogger(__name__)


def shadowed(config: Config, learner: Learner, pool: Pool, model_dir: Path, workdir: Path) -> Learner:
    """Returns the learner, with a shadow if the config asks for one.

    Args:
      pool: the learner's.

    Raises:
      UserError: the other engine has no learner, or can't do what the config asks.
    """
    if not config.parity.shadow_every:
        return learner
    engine = config.parity.shadow_engine or find_plugin(pool.engine).shadow
    plugin = find_plugin(engine)
    if not plugin.learns or engine == pool.engine:
        raise UserError(f"parity.shadow_engine: {engine!r} is no other learner (name another engine that learns)")
    plugin.check(config, Allocation(None, Pool(engine)))
    return ShadowedLearner(config, learner, ShadowProcess(config, engine, model_dir, workdir / "shadow"))


class ShadowedLearner:
    """Implements `rljax.engine.Learner` by another learner.

    The first optimizer step of every `parity.shadow_every`-th batch is handed over, in a supervised
    warm-up too: the learner's state before it, in a checkpoint, and the batch. The run waits for
    that checkpoint and a score, and for nothing else: while the shadow is at work, batches are not
    handed over but counted (`parity/dropped`), and told once there are MOST_DROPPED in a row. The
    end of the run tells how many were compared. Differences come with the metrics of the next
    update. When the shadow fails the run goes on without one.

    A learner of several processes saves and scores in all of them; this is about the leader's.
    """

    def __init__(self, config: Config, learner: Learner, shadow: ShadowProcess) -> None:
        self._config, self._learner = config, learner
        self._shadow: ShadowProcess | None = shadow
        every = config.parity.shadow_every  # a supervised step takes one update
        self._every = {True: every, False: every * config.actor.ppo_n_minibatches}
        self._updates = {True: 0, False: 0}  # so far, by whether they were supervised
        self._given: tuple[Batch, Computed] | None = None
        self._due = self._compared = 0  # batches
        self._dropped = 0  # in a row

    def __getattr__(self, name: str) -> Any:
        """Everything that isn't about the shadow is the learner's own."""
        return getattr(self._learner, name)

    def update(self, batch: Batch) -> dict[str, Mean]:
        return self._step(self._learner.update, batch, supervised=False)

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        return self._step(self._learner.update_supervised, batch, supervised=True)

    def close(self) -> None:
        if self._shadow is not None:
            self._shadow.close()
        if self._due:
            level = logging.INFO if self._compared else logging.WARNING
            log.log(level, "parity: the shadow compared %d of %d batches that came due", self._compared, self._due)
        self._learner.close()

    def _step(self, update: Callable[[Batch], dict[str, Mean]], batch: Batch, *, supervised: bool) -> dict[str, Mean]:
        metrics = self._report()
        due = self._updates[supervised] % self._every[supervised] == 0
        self._updates[supervised] += 1
        if not due or self._shadow is None:
            return update(batch) | metrics
        self._due += 1
        if self._shadow.busy:
            self._drop(self._shadow)
            return update(batch) | metrics | {"parity/dropped": Mean(1, 1)}
        self._dropped = 0
        began = time.perf_counter()
        try:
            self._shadow.place.mkdir()
            self._learner.save(self._shadow.place / LEARNER)
            logp = self._learner.score(batch)
        except (OSError, UserError) as error:
            self._give_up(error)
            return update(batch) | metrics
        seconds = time.perf_counter() - began
        means = update(batch)
        self._given = batch, Computed.of(logp, means)
        try:
            self._shadow.give(batch, supervised=supervised)
        except OSError as error:
            self._give_up(error)
        return means | metrics | {"timeperf/shadow": Mean(seconds, 1)}

    def _report(self) -> dict[str, Mean]:
        """Returns the differences of a batch that the shadow is done with; empty without one."""
        if self._shadow is None or self._given is None:
            return {}
        try:
            answer: Answer | None = self._shadow.take()
        except (EOFError, OSError, ValueError) as error:
            self._give_up(error)
            return {}
        if answer is None:
            return {}
        (batch, ours), self._given = self._given, None
        self._compared += 1
        return compare(batch, self._config.actor.dtype, ours, answer.theirs, answer.right)

    def _drop(self, shadow: ShadowProcess) -> None:
        """Counts a batch that is not handed over, and says once that there were many in a row."""
        self._dropped += 1
        if self._dropped == MOST_DROPPED:
            log.warning(
                "parity: the shadow has not answered while %d more batches came due (parity.shadow_every: a larger one"
                " leaves it the time; its words are in %s)",
                MOST_DROPPED,
                shadow.log,
            )

    def _give_up(self, error: Exception) -> None:
        assert self._shadow is not None
        log.warning("parity: %s: the run goes on without a shadow", error)
        self._shadow.close()
        self._shadow = self._given = None
