"""Makes recorded steps again: restores a checkpoint, and trains on the recorded batches after it."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rljax.config.schema import Config
from rljax.engine import Learner
from rljax.errors import UserError
from rljax.flight.recording import Chain, Recording, StepRecord
from rljax.metrics.accumulator import PhaseTimer
from rljax.metrics.mean import Mean, flatten
from rljax.train_step import learn, supervise

NOT_COMPARED = ("timeperf/", "perf/")  # metrics of this machine at that time

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Remade:
    """A step that was made again."""

    step: int
    metrics: dict[str, float]  # by the names of metrics.jsonl, without those of time and memory


class Replayer:
    """A learner that can be brought to its state after any recorded step.

    Going forward it trains on the recorded batches; going back it begins with a checkpoint again.
    A step that was made with another config than the one before is made with its own.

    Example:

        replayer = Replayer(recording, make_learner)
        record = recording.read(57)
        replayer.go_to(record.header.parent, record.config)
        replayer.learner.score(batch)
        metrics = replayer.make(record).metrics

    Attributes:
      distance: number of steps made since the learner's state was read from a checkpoint.
    """

    def __init__(
        self,
        recording: Recording,
        make_learner: Callable[[Config], Learner],
        change: Callable[[Config], Config] = lambda config: config,
        on_made: Callable[[Remade], None] = lambda remade: None,
    ) -> None:
        """
        Args:
          make_learner: makes a learner with the weights that the run began with.
          change: changes the config of every step, for other devices or another engine.
          on_made: called with each step that `go_to` makes on its way.
        """
        self.distance = 0
        self._recording, self._make_learner, self._change, self._on_made = recording, make_learner, change, on_made
        self._learner: Learner | None = None
        self._config: Config | None = None  # of the learner
        self._at = 0  # step after which the learner's state is

    @property
    def learner(self) -> Learner:
        """The learner, in its state after the step of the last `go_to` or `make`."""
        assert self._learner is not None, "go_to comes first"
        return self._learner

    def go_to(self, step: int, config: Config) -> None:
        """Brings the learner to its state after a step.

        Args:
          step: 0 is the initial model.
          config: of the step that is to be made next.

        Raises:
          UserError: no checkpoint before it can be restored, or a batch after it is gone.
        """
        error: UserError | None = None
        for chain in self._ways(step):
            records = [self._recording.read(step) for step in chain.steps]
            try:
                self._begin(chain.base, records[0].config if records else config)
            except UserError as failure:
                log.warning("%s: an older checkpoint is tried", failure)
                error = error or failure
                continue
            for record in records:
                self._on_made(self.make(record))
            self._use(config)
            return
        raise error or self._recording.cannot_reach(step)

    def make(self, record: StepRecord) -> Remade:
        """Makes a step again, from the learner's present state."""
        self._use(record.config)
        self.learner.scale_lr(record.header.lr_factor)
        metrics = _step(self.learner, self._change(record.config), record)
        self._at = record.header.step
        self.distance += 1
        return Remade(self._at, comparable(flatten(metrics)))

    def with_config(self, config: Config) -> Learner:
        """Hands over the learner, in its present state but of another config.

        The replayer has none from then on. Close the learner yourself.
        """
        self._remake(config)
        learner, self._learner = self.learner, None
        return learner

    def close(self) -> None:
        """Frees the learner."""
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    def _ways(self, step: int) -> Iterator[Chain]:
        """Yields the ways to a step, beginning with the one from where the learner is."""
        chains = list(self._recording.chains(step))
        if self._learner is not None and chains:
            steps = (chains[-1].base, *chains[-1].steps)
            if self._at in steps:
                yield Chain(self._at, steps[steps.index(self._at) + 1 :])
        yield from chains

    def _begin(self, base: int, config: Config) -> None:
        """Brings the learner to its state at a checkpoint, unless it is there already."""
        self._use(config)
        if base == self._at:
            return
        if base == 0:
            raise UserError("the learner is past the initial model")
        self.learner.restore(self._recording.checkpoint(base))
        self._at, self.distance = base, 0

    def _use(self, config: Config) -> None:
        """Has the learner be one of this config, changed by `change`. Its state stays."""
        config = self._change(config)
        if config == self._config:
            return
        if self._learner is None:
            self._learner, self._config = self._make_learner(config), config
            return
        self._remake(config)

    def _remake(self, config: Config) -> None:
        """Makes the learner anew with another config, in the same state."""
        before = self.learner
        with tempfile.TemporaryDirectory() as directory:
            state = Path(directory) / "learner"
            before.save(state)
            before.close()
            self._learner, self._config = self._make_learner(config), config
            self._learner.restore(state)


def _step(learner: Learner, config: Config, record: StepRecord) -> dict[str, Mean]:
    if config.actor.loss == "sft":
        return supervise(learner, config, [t for group in record.groups for t in group.trajectories])
    version = record.header.version
    assert version is not None, "a rollback is no step to make"
    return learn(learner, config, record.groups, version, PhaseTimer(lambda what: None)).metrics


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics that don't depend on the machine and its load."""
    return {name: value for name, value in metrics.items() if not name.startswith(NOT_COMPARED)}
