"""One loop for synchronous, asynchronous and supervised training. This is the system; the rest is
its parts.

               +------------------- the prompt again: failed, or too old ---------------------+
               v                                                                              |
    prompts -> admit -> generate x n_samples -> reward -> filter -> journal -> buffer -> take |
               ^        (sampler, workflow)                                      |         |  |
               |                                                                 +---------|--+
               |                                                                           v
               |            metrics <- publish <- update x minibatches <- pack <- score <- advantages
               |                          |        (learner)
               +--------------------------+  a version more: there is room again

    who              waits for                                          who unblocks it
    producer         room: max lag, concurrency (rollout/buffer.py)             publish; a group that ends
    request          the sampler, rollout.request_timeout               the sampler, or the timeout (rollout/producer.py)
    learner          consumer_batch_size groups, oldest first           the producer
    a server         that came back without weights: a publish          the learner, after its step or while it waits
    publish          the sampler to stop between two decode steps       the sampler
    evaluation       its episodes; training's go on beside them         the sampler
    save             the disk; generating goes on                       the disk
    everyone         nothing for more than recover.hang_timeout         the watchdog ends the run

The producer (rollout/producer.py) is a task of the event loop that keeps prompts in flight, or it
leases them to other processes (workers/); what becomes of each, rollout/tracker.py says. The
learner (train_step.py) works in a thread, so that sampling goes on during an update. Between them
stands the buffer (rollout/buffer.py), which decides what may be generated and what may be trained
on: at `max_head_offpolicyness=0` it admits nothing while an update runs, and that is synchronous
RL. Evaluation is the workflow with no learner (rollout/evaluation.py); supervised warm-up and SFT
are the learner with no sampler.

Order of a step, which is a contract: take at version v -> update (every token is at most
max_head_offpolicyness versions older than v) -> publish, version v + 1 -> room for the next
prompts -> metrics -> guardrails -> evaluate -> save. A checkpoint therefore holds a learner of v +
1 steps, a book at version v + 1, and no half of anything; what was in flight is generated again
(checkpoints/recovery.py, checkpoints/store.py, rollout/journal.py).

A step counts from the start of the run, supervised ones included; a version counts those of RL
alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rljax.checkpoints.recovery import Recovery
from rljax.config.schema import Config, FrequencyConfig
from rljax.engine import Engine, ExportToDirectory
from rljax.errors import GuardrailError, TooManyFailures, UserError
from rljax.metrics.accumulator import Accumulator, PhaseTimer
from rljax.metrics.guardrails import Guardrails
from rljax.metrics.mean import Mean, merge
from rljax.process.signals import stopping
from rljax.process.watchdog import Watchdog
from rljax.rollout.buffer import Buffer, Entry, PromptSource
from rljax.rollout.evaluation import PREFIX, Evaluation, evaluate
from rljax.rollout.journal import Record
from rljax.rollout.limits import limits_of, supervised_total, total_steps
from rljax.rollout.producer import PatientGenerator, Producer, Rollouts
from rljax.rollout.tracker import PromptTracker
from rljax.rollout.workflow import Workflow
from rljax.sinks import Sink, State, Status
from rljax.train_step import learn, supervise
from rljax.types import Group, Prompt, SamplingParams, Trajectory
from rljax.workers.server import Job, WorkerServer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Labeled:
    """Labeled examples, for a supervised warm-up or SFT: a stream of its own, and what makes a
    prompt an example.
    """

    prompts: PromptSource
    encode: Callable[[Prompt], Trajectory]


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a run is made of. `config` is resolved (rljax/config/io.py)."""

    config: Config
    engine: Engine
    prompts: PromptSource
    workflow: Workflow
    params: SamplingParams
    open_sinks: Callable[[int], Sink]  # given the steps that are finished: what files say of later ones is to be cut
    workdir: Path
    accept: Callable[[Group], bool] = lambda group: True  # rollout.should_accept_fn
    labeled: Labeled | None = None
    evaluation: Evaluation | None = None
    worker_server: WorkerServer | None = None  # where other processes generate; None: this one does
    measured: Callable[[], dict[str, Mean]] = dict  # what its parts have measured themselves since the last call: the rewards


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: `finished` is False when a signal asked it to stop; it was saved then and
    goes on when run again.
    """

    step: int
    version: int
    finished: bool


def train(run: Run) -> Outcome:
    """Trains to the end, or until SIGTERM, SIGINT or SIGHUP. Blocks; closes engine and sinks.

    Raises:
      UserError: bad input, a checkpoint of another run, a full disk.
      TooManyFailures: by `recover.max_consecutive_failures`.
      GuardrailError: by `guard`.
    """
    return asyncio.run(Loop(run).run())


class Loop:
    """The state of a run between two steps, and the steps."""

    def __init__(self, run: Run) -> None:
        self.parts = run
        self.config = config = run.config
        self.buffer = Buffer(run.prompts, limits_of(config, len(run.prompts)))
        self.recovery = Recovery(config, run.workdir, run.engine.learner, self.buffer)
        self.guardrails = Guardrails(config.guard)
        self.accumulator = Accumulator()
        self.supervised_steps = 0  # finished
        self.supervised_total = supervised_total(config, len(run.prompts))
        self.stop = asyncio.Event()  # asked to, by a signal
        self.learning = asyncio.Lock()  # held while the learner's weights change, and while they are read
        self.known: dict[tuple[str, int], Record] = {}  # groups of a process that was killed, by uid and attempt
        self.evaluated: tuple[int, float] | None = None  # step, reward
        self.written: Counter[str] = Counter()  # of buffer.counts, those that metrics have told of
        self.epochs = 0  # whole ones that are done
        self.wrote = time.perf_counter()  # metrics of a step
        run.workdir.mkdir(parents=True, exist_ok=True)

    @property
    def step(self) -> int:
        """Finished, supervised ones included."""
        return self.supervised_steps + self.buffer.version

    async def run(self) -> Outcome:
        run = self.parts
        with Watchdog(self.config.recover.hang_timeout, run.workdir / "hang.txt") as watchdog, stopping(self._stop):
            self.beat, self.timer = watchdog.beat, PhaseTimer(watchdog.beat)
            try:
                await self._restore()
                self.sinks = run.open_sinks(self.step)
                try:
                    if run.worker_server is not None:
                        await run.worker_server.open()
                    await self._train()
                finally:
                    if run.worker_server is not None:
                        await run.worker_server.close()
                    self.sinks.close()
            finally:
                self.recovery.close()
                await run.engine.close()
        return Outcome(self.step, self.buffer.version, finished=not self.stop.is_set())

    async def _train(self) -> None:
        self._tell(State.RUNNING)
        try:
            await self._supervise()
            made_elsewhere = bool(self.config.rollout.addr)  # else the sampler was made with the initial weights
            if (self.step or made_elsewhere) and not self.stop.is_set():
                await self.parts.engine.publish(self.buffer.version)
            if self.buffer.version == 0:
                await self._evaluate()
            if self.config.actor.loss != "sft":
                await self._reinforce()
            self._end_well()
        except TooManyFailures:
            await self._save(failed=True)
            raise
        except GuardrailError as error:
            await self._save(failed=True)
            raise GuardrailError(f"{error}; {self._where_it_goes_on()}") from None
        await self._evaluate()
        if not self._suspect():
            await self._save()
        if self.stop.is_set():
            log.warning("stopped at step %d; %s", self.step, self._where_it_goes_on())
            self._tell(State.STOPPED)
            return
        if self.config.saver.export_final:
            await asyncio.to_thread(self._export)
        self._tell(State.FINISHED)

    async def _supervise(self) -> None:
        """Warm-up, or all of SFT: the learner alone."""
        labeled, sft = self.parts.labeled, self.config.actor.loss == "sft"
        if self.supervised_steps >= self.supervised_total:
            return
        if labeled is None:
            raise UserError("warmup.steps: supervised steps need labeled examples (a dataset whose format has answers)")
        size = self.buffer.limits.batch_size if sft else self.config.warmup.batch_size
        while self.supervised_steps < self.supervised_total and not self.stop.is_set():
            examples = [labeled.encode(next(labeled.prompts)) for _ in range(size)]
            with self.timer.phase("update"):
                metrics = await asyncio.to_thread(supervise, self.parts.engine.learner, self.config, examples)
            self.supervised_steps += 1
            epochs = self.supervised_steps * size // len(labeled.prompts)
            self._write(metrics)
            self.guardrails.check(metrics)
            if sft and self._due(self.config.evaluator, epochs):
                await self.parts.engine.publish(self.step)
                await self._evaluate()
            if self._due(self.config.saver, epochs) and not self.guardrails.suspect:
                await self._save()
            self.epochs = epochs
        self.epochs = self.epochs if sft else 0
        self._end_well()
        await self._save()  # version 0 is these weights: a run that is killed goes on with them, to the bit

    async def _reinforce(self) -> None:
        """The loop."""
        producer = asyncio.create_task(self._produce(), name="producer")
        try:
            while (entries := await self._take(producer)) is not None:
                await self._step(entries)
        finally:
            producer.cancel()
            await asyncio.wait([producer])

    async def _take(self, producer: asyncio.Task[None]) -> list[Entry] | None:
        """The next batch; None at the end of the data, or when the run is to stop."""
        start = time.perf_counter()
        try:
            while not self.stop.is_set():
                if producer.done():
                    producer.result()  # raises what ended it
                change = self.buffer.change()
                if (entries := self.buffer.take()) is not None:
                    return entries
                if self.buffer.complete:
                    return None
                await self._first_of(producer, change)
            return None
        finally:
            self.accumulator.count("rollout/wait/learner", time.perf_counter() - start)

    async def _first_of(self, *awaited: asyncio.Future[Any]) -> None:
        """Until one of them is done. Meanwhile the learner is idle, and a server that comes back
        without weights is given those of the present version: what is awaited may itself wait for
        that server.
        """
        engine = self.parts.engine
        lacking = asyncio.create_task(engine.lacks_weights(), name="lacking weights")
        try:
            while not any(future.done() for future in awaited):
                await asyncio.wait([*awaited, lacking], return_when=asyncio.FIRST_COMPLETED)
                if lacking.done():
                    async with self.learning:
                        await engine.publish(self.step if self.config.actor.loss == "sft" else self.buffer.version)
                    lacking = asyncio.create_task(engine.lacks_weights(), name="lacking weights")
        finally:
            lacking.cancel()

    async def _step(self, entries: Sequence[Entry]) -> None:
        """One batch: update, publish, metrics, evaluate, save.

        Sampling goes on all the while, as far as the lag allows.
        """
        engine, version, groups = self.parts.engine, self.buffer.version, [entry.group for entry in entries]
        async with self.learning:
            with self.timer.phase("step"):
                async with engine.learning():
                    metrics = await asyncio.to_thread(learn, engine.learner, self.config, groups, version, self.timer)
                with self.timer.phase("publish"):
                    await engine.publish(version + 1)
                self.buffer.publish()
        if self.parts.worker_server is not None:
            self.parts.worker_server.weights_changed()
        for uid, trajectory in itertools.islice(of_different_groups(groups), self.config.stats_logger.samples_per_step):
            self.sinks.sample(self.step, uid, trajectory)
        metrics = merge([metrics, self._of_buffer(len(groups))])
        self._write(metrics)
        self.guardrails.check(metrics)
        if line := self.guardrails.hint(metrics):
            log.warning("%s", line)
        epochs = self.buffer.done // len(self.parts.prompts)
        if self._due(self.config.evaluator, epochs):
            await self._evaluate()
        if self._due(self.config.saver, epochs) and not self.guardrails.suspect:
            await self._save(epochs)
        self.epochs = epochs

    def _stop(self) -> None:
        """Asked to by a signal: finish the step, save, exit."""
        self.stop.set()
        self.buffer.wake()

    # Guardrails

    def _end_well(self) -> None:
        """The end of the supervised steps, and of the run. Raises GuardrailError."""
        if not self.stop.is_set():
            self.guardrails.at_the_end()

    def _suspect(self) -> bool:
        """Whether the state is not worth a checkpoint to go on from: a guardrail has begun to
        count.
        """
        if line := self.guardrails.suspect:
            log.warning("step %d is not saved, for %s (guard)", self.step, line)
        return bool(line)

    def _where_it_goes_on(self) -> str:
        steps = self.recovery.checkpoints.steps()
        failed = self.parts.workdir / "checkpoints" / f"{self.step}-failed"
        kept = f"the state is kept in {failed}, and " if failed.exists() else ""
        return f"{kept}the same command goes on from step {steps[-1]}" if steps else f"{kept}the same command begins anew"

    # Parts of it

    async def _produce(self) -> None:
        """Keeps groups coming, from this process or from others, until it is cancelled."""
        worker_server, generator = self.parts.worker_server, self.parts.engine.sampler
        if worker_server is None:
            await self._producer().run()
        else:
            await worker_server.run(Job(self.buffer, self._tracker(), generator, self.accumulator, self._export_between_steps))

    async def _export_between_steps(self, directory: Path) -> int:
        """The policy as a HF directory, for samplers of other processes. Returns its version."""
        async with self.learning:
            await asyncio.to_thread(self.parts.engine.learner.export, ExportToDirectory(directory))
            return self.buffer.version

    def _producer(self) -> Producer:
        """Makes the groups in this process."""
        run, config = self.parts, self.config
        generator = PatientGenerator(
            run.engine.sampler,
            timeout=config.rollout.request_timeout,
            retries=config.rollout.request_retries,
            lost=lambda error: self.accumulator.count(f"rollout/lost/{error.kind}"),
        )
        rollouts = Rollouts(run.workflow, generator, run.params, config.gconfig.n_samples, config.seed, run.accept)
        return Producer(rollouts, self.buffer, self._tracker(), self.accumulator)

    def _tracker(self) -> PromptTracker:
        return PromptTracker(
            self.config,
            buffer=self.buffer,
            journals=self.recovery.journals,
            known=self.known,
            accumulator=self.accumulator,
            beat=self.beat,
            trace=self.parts.workdir / "trace.jsonl" if self.config.rollout.enable_rollout_tracing else None,
        )

    async def _evaluate(self) -> None:
        """At this step, if the run has evaluations and it was not done; given up when the run is
        asked to stop.
        """
        run, evaluator = self.parts, self.config.evaluator
        never = run.evaluation is None or (evaluator.freq_steps is None and evaluator.freq_epochs is None)
        if never or self.stop.is_set() or (self.evaluated is not None and self.evaluated[0] == self.step):
            return
        assert run.evaluation is not None
        with self.timer.phase("evaluate"):
            work = asyncio.create_task(evaluate(run.engine.sampler, run.evaluation, self.config, self.beat))
            stop = asyncio.create_task(self.stop.wait())
            try:
                await self._first_of(work, stop)
                given_up = not work.done()
            finally:
                stop.cancel()
                if not work.done():
                    work.cancel()
                    await asyncio.wait([work])
            if given_up:
                return
        metrics = work.result()
        self.evaluated = (self.step, metrics[f"{PREFIX}/reward"].value)
        self.sinks.write(self.step, metrics | self.timer.drain())

    async def _save(self, epochs: int | None = None, *, failed: bool = False) -> None:
        labeled = self.parts.labeled
        state: dict[str, Any] = {
            "supervised_steps": self.supervised_steps,
            "labeled": labeled.prompts.state() if labeled else None,
            "accumulator": self.accumulator.state(),
            "written": dict(self.written),
            "epochs": self.epochs if epochs is None else epochs,
        }
        reward = self.evaluated[1] if self.evaluated and self.evaluated[0] == self.step else math.nan
        with self.timer.phase("save"):
            score = None if math.isnan(reward) else reward
            async with self.learning:
                await self.recovery.save(self.step, state, score=score, failed=failed)

    async def _restore(self) -> None:
        state, self.known = await self.recovery.restore()
        if state is None:
            return
        self.supervised_steps, self.epochs = state["supervised_steps"], state["epochs"]
        if self.parts.labeled and state["labeled"]:
            self.parts.labeled.prompts.restore(state["labeled"])
        self.accumulator.restore(state["accumulator"])
        self.written = Counter(state["written"])

    def _write(self, metrics: dict[str, Mean]) -> None:
        """A step's metrics, and what was counted and timed since the last."""
        worker_server = self.parts.worker_server
        measured = [
            self.parts.measured(),
            worker_server.take_metrics() if worker_server else {},
            self.accumulator.drain(),
            self.timer.drain(),
            self._wall(),
        ]
        self.sinks.write(self.step, merge([metrics, *measured]))
        self._tell(State.RUNNING)

    def _wall(self) -> dict[str, Mean]:
        """Seconds since the last step was written: sampling, waits, evaluations and saves
        included.
        """
        before, self.wrote = self.wrote, time.perf_counter()
        return {"timeperf/wall": Mean(self.wrote - before, 1)}

    def _of_buffer(self, groups: int) -> dict[str, Mean]:
        """What became of prompts since the last step, and what is under way now."""
        buffer, names = self.buffer, ("rejected", "stale", "stale_tokens", "dropped", "again")
        since = {f"rollout/{name}": buffer.counts[name] - self.written[name] for name in names}
        self.written = Counter(buffer.counts)
        now = {"rollout/running": buffer.running, "rollout/ready": buffer.ready, "rollout/groups": groups}
        return {name: Mean(float(value), 1) for name, value in (since | now).items()}

    def _due(self, frequency: FrequencyConfig, epochs: int) -> bool:
        """Whether it is time for what is done every so many steps or epochs, the step just
        finished being the newest.
        """
        by_steps = frequency.freq_steps is not None and self.step % frequency.freq_steps == 0
        every = frequency.freq_epochs
        return by_steps or (every is not None and epochs // every > self.epochs // every)

    def _tell(self, state: State) -> None:
        total = total_steps(self.config, len(self.parts.prompts))
        self.sinks.status(Status(state, step=self.step, version=self.buffer.version, total_steps=total))

    def _export(self) -> None:
        """The policy as a HF directory in WORKDIR/export, there as a whole or not at all."""
        target, aside = self.parts.workdir / "export", self.parts.workdir / ".export.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        self.parts.engine.learner.export(ExportToDirectory(aside))
        shutil.rmtree(target, ignore_errors=True)
        os.rename(aside, target)


def of_different_groups(groups: Sequence[Group]) -> Iterator[tuple[str, Trajectory]]:
    """The first trajectory of each group with the group's uid, then the second of each, and so on."""
    rounds = itertools.zip_longest(*([(group.uid, t) for t in group.trajectories] for group in groups))
    return (pair for several in rounds for pair in several if pair is not None)
