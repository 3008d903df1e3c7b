"""Writes the batch of each step to WORKDIR/flight, in a thread of its own, bounded in size."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rljax.checkpoints.disk import reason
from rljax.config.schema import Config
from rljax.flight.recording import Header, Kept
from rljax.flight.store import RecordStore
from rljax.train_step import Scored
from rljax.types import Group

QUEUE = 8  # jobs that may wait for the disk before the learner does
PATIENCE = 60.0  # seconds that the learner waits for it

log = logging.getLogger(__name__)


class Recorder:
    """Flight recorder of a run. An error of the disk ends the recording, with a warning.

    `record` and `scored` wait for a disk that is behind: call them outside the event loop's thread.

    Example:

        recorder = Recorder(config, workdir, first_step=12)
        recorder.record(13, 12, groups, lr_factor=1.0)
        recorder.scored(13, scored)
        recorder.keep(13, "guard.max_grad_norm: ...", checkpoints=[10])
        recorder.close()

    Attributes:
      parent: step whose learner the next step begins with. Set it when the learner is restored.
    """

    def __init__(self, config: Config, workdir: Path, *, first_step: int) -> None:
        """Opens the recording of a run. Records of steps after `first_step` are deleted."""
        self.parent = first_step
        self._parents: dict[int, int] = {}
        self._checkpoints = config.flight.keep_checkpoints
        self._jobs: queue.SimpleQueue[Callable[[RecordStore], None] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(QUEUE)
        self._store: RecordStore | None = None  # None: there is nothing to record, or no place for it
        self._records = False  # True until an error ends the recording
        if not config.flight.steps:
            return
        try:
            self._store = RecordStore(config, workdir, first_step)
            self._parents = self._store.parents()
        except OSError as error:
            self._give_up(error)
            return
        self._records = True
        self._thread = threading.Thread(target=self._work, args=[self._store], name="flight recorder", daemon=True)
        self._thread.start()

    @property
    def held(self) -> Collection[int]:
        """Steps of the checkpoints that kept steps are made again from."""
        return self._store.held if self._store else frozenset()

    def record(self, step: int, version: int, groups: Sequence[Group], lr_factor: float) -> None:
        """Records the batch of a step that is about to be made.

        Args:
          version: training steps finished before it.
          lr_factor: of the learning rates, as `Learner.scale_lr` has it.
        """
        header = self._next(step, version, lr_factor)
        self._wait_and_put(lambda store: store.add(header, groups))

    def scored(self, step: int, scored: Scored) -> None:
        """Records what was computed from a step's batch before the first update."""
        self._wait_and_put(lambda store: store.add_scores(step, scored))

    def rolled_back(self, step: int, target: int) -> None:
        """Records that the learner was restored.

        Args:
          step: the number that the rollback itself has among the steps.
          target: step after which the learner's state now is.
        """
        self.parent = target
        header = self._next(step, None, 1.0)
        self._put(lambda store: store.add(header, ()))

    def _next(self, step: int, version: int | None, lr_factor: float) -> Header:
        header = Header(step, version, self.parent, lr_factor)
        self._parents[step], self.parent = self.parent, step
        return header

    def keep(self, step: int, why: str, *, checkpoints: Collection[int] | None) -> None:
        """Keeps a step's batch beyond the last `flight.steps`.

        The nearest checkpoint before it, and the batches from there on, are kept with it as long as
        there are at most `flight.keep_checkpoints` such checkpoints.

        Args:
          why: one line: which guard or rule spoke.
          checkpoints: steps of the checkpoints that exist now; None to keep the batch alone.
        """
        if self._store is None or step not in self._parents:
            return
        base, steps = None, [step]
        if checkpoints is not None:
            base, steps = self._way_to(step, checkpoints)
            if base is None or not self._store.hold(base, self._checkpoints):
                base, steps = None, [step]
        self._put(lambda store: store.keep(Kept(step, why, base), steps))

    def _way_to(self, step: int, checkpoints: Collection[int]) -> tuple[int | None, list[int]]:
        """Returns the nearest checkpoint before a step (0: the initial model), and the steps since."""
        steps, parent = [step], self._parents[step]
        while parent not in checkpoints and parent in self._parents:
            steps.append(parent)
            parent = self._parents[parent]
        return (parent if parent in checkpoints or parent == 0 else None), steps

    def close(self) -> None:
        """Waits until everything is written, or nothing has been for a while."""
        if self._records:
            self._jobs.put(None)
            self._thread.join(PATIENCE)

    def _wait_and_put(self, job: Callable[[RecordStore], None]) -> None:
        """Has a job done, after a wait if many are waiting."""
        if self._records and not self._room.acquire(timeout=PATIENCE):
            self._give_up(TimeoutError(f"nothing was written for {PATIENCE:g} s"))

        def counted(store: RecordStore) -> None:
            try:
                job(store)
            finally:
                self._room.release()

        self._put(counted)

    def _put(self, job: Callable[[RecordStore], None]) -> None:
        if self._records:
            self._jobs.put(job)

    def _work(self, store: RecordStore) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._records:
                continue
            try:
                job(store)
            except Exception as error:  # whatever it is, the run goes on
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._records = False
        log.warning("flight: %s: the run goes on, and records no more batches", reason(error))
