"""Sampling side of a run: the task that turns prompts into groups, here or in rollout workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rljax.metrics.accumulator import Accumulator
from rljax.metrics.busy import BusyClock
from rljax.metrics.mean import Mean, merge
from rljax.rollout.buffer import Buffer
from rljax.rollout.journal import Journals, Record
from rljax.rollout.producer import SAMPLING_SECONDS, GroupRunner, Producer, RetryingGenerator
from rljax.rollout.result import Failure
from rljax.rollout.tracker import PromptTracker
from rljax.run.parts import Run
from rljax.workers.server import Export, Job


class Sampling:
    """Task that generates groups into the buffer, and what it needs over the life of a run.

    Example:

        await sampling.open()
        sampling.start()
        await asyncio.wait([sampling.task])     # it ends by an error only
        await sampling.stop()
        await sampling.close()
    """

    def __init__(
        self,
        run: Run,
        buffer: Buffer,
        journals: Journals,
        accumulator: Accumulator,
        *,
        recovered: dict[tuple[str, int], Record],
        beat: Callable[[str], None],
        export: Export,
    ) -> None:
        """
        Args:
          recovered: groups that a killed process finished and that can be used, by uid and attempt.
          beat: tells the watchdog that something moved.
          export: writes the policy for workers with samplers of their own.
        """
        self._run, self._buffer, self._journals, self._accumulator = run, buffer, journals, accumulator
        self._recovered, self._beat, self._export = recovered, beat, export
        self._task: asyncio.Task[None] | None = None
        self._trackers: list[PromptTracker] = []
        self._busy = BusyClock()  # of requests in this process

    @property
    def first_failure(self) -> Failure | None:
        """First failure of a whole group here, of the last in a row; None if there was none."""
        return next((tracker.first_failure for tracker in self._trackers if tracker.first_failure), None)

    async def open(self) -> None:
        """Lets workers attach, where the run has any."""
        if self._run.worker_server is not None:
            await self._run.worker_server.open()

    async def close(self) -> None:
        """Tells all workers that the run is over."""
        if self._run.worker_server is not None:
            await self._run.worker_server.close()

    @property
    def task(self) -> asyncio.Task[None]:
        assert self._task is not None, "not started"
        return self._task

    def start(self) -> None:
        self._task = asyncio.create_task(self._produce(), name="producer")

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    def published(self) -> None:
        """Has workers' own samplers get the new weights. Call it after each publish."""
        if self._run.worker_server is not None:
            self._run.worker_server.weights_changed()

    async def halt(self) -> None:
        """Stops generating in this process. Workers go on, until `revoke` voids what they do."""
        if self._run.worker_server is None:
            await self.stop()

    def revoke(self, version: int) -> None:
        """Voids what is in flight. Call it after `halt`, before the buffer is rolled back.

        Args:
          version: of the weights that everything is sampled by from now on, or by newer ones.
        """
        if self._run.worker_server is not None:
            self._run.worker_server.revoke(version)
        self._recovered.clear()

    def resume(self) -> None:
        """Generates again after `halt`."""
        if self._run.worker_server is None:
            self.start()
        self.published()

    def take_metrics(self) -> dict[str, Mean]:
        """Returns metrics of workers and reward processes since the last call."""
        server = self._run.worker_server
        own = {SAMPLING_SECONDS: Mean(self._busy.drain(), 1)} if server is None else server.take_metrics()
        return merge([self._run.take_metrics(), own])

    async def _produce(self) -> None:
        """Generates groups, in this process or in rollout workers, until it is cancelled."""
        run, config = self._run, self._run.config
        if run.worker_server is not None:
            job = Job(self._buffer, self._tracker(), run.engine.sampler, self._accumulator, self._export)
            await run.worker_server.run(job)
            return
        generator = RetryingGenerator(
            run.engine.sampler,
            timeout=config.request_timeout,
            retries=config.rollout.request_retries,
            lost=lambda error: self._accumulator.count(f"rollout/lost/{error.kind}"),
            busy=self._busy,
        )
        runner = GroupRunner(
            run.workflow,
            generator,
            run.params,
            config.gconfig.n_samples,
            config.seed,
            run.accept,
            config.episode_timeout,
            run.vocab_size,
        )
        await Producer(runner, self._buffer, self._tracker(), self._accumulator).run()

    def _tracker(self) -> PromptTracker:
        run = self._run
        tracker = PromptTracker(
            run.config,
            buffer=self._buffer,
            journals=self._journals,
            recovered=self._recovered,
            accumulator=self._accumulator,
            beat=self._beat,
        )
        self._trackers.append(tracker)
        return tracker
