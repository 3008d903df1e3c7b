"""One loop for synchronous, asynchronous and supervised training.

              +--------------- the prompt is requeued: failed, or too old ------------------+
              v                                                                             |
    prompts > admit > generate x n_samples > reward > filter > journal > buffer > take      |
              ^       (sampler, workflow)                                  |        |       |
              |                                                            +--------|-------+
              |                                                                     v
              |        metrics < publish < update x minibatches < pack < score < advantages
              |                     |      (learner)
              +---------------------+  the version goes up: room for more prompts

    who          waits for                                    who unblocks it
    producer     room: max lag, concurrency (buffer.py)       publish, or a group that ends
    request      the sampler (producer.py)                    the sampler, or request_timeout
    learner      consumer_batch_size groups, oldest first     the producer
    server       a publish: it restarted without weights      the learner, between two steps
    publish      the sampler to pause between decode steps    the sampler
    evaluation   its episodes, beside those of training       the sampler
    save         the disk, while sampling goes on             the disk
    all of them  at most recover.hang_timeout                 the watchdog, which ends the run

The producer (rollout/producer.py) is a task of the event loop that keeps prompts in flight; with
rollout workers, a server leases the prompts to them instead (workers/). The tracker
(rollout/tracker.py) decides what happens to each prompt afterwards. The learner (train_step.py)
works in a thread, so that sampling goes on during an update. Between producer and learner is the
buffer (rollout/buffer.py), which decides what may be generated and what may be trained on. At
`max_head_offpolicyness=0` it admits nothing while an update runs, which is synchronous RL.
Evaluation is the workflow without a learner (rollout/evaluation.py). Supervised warm-up and SFT are
the learner without a sampler.

The order within a step is a contract: take at version v -> update (each token is at most
max_head_offpolicyness versions older than v) -> publish, version v + 1 -> room for the next
prompts -> metrics -> guardrails -> evaluate -> save. A checkpoint therefore holds a learner after
v + 1 steps and a buffer at version v + 1. Prompts in flight are generated again
(checkpoints/recovery.py, checkpoints/store.py, rollout/journal.py).

A guardrail (oversight.py) may stop the run, lower the learning rate, or roll back: learner
and data position of an older checkpoint are restored and published as a version of their own, all
prompts since then are drawn again, and everything in flight or ready is generated again. A version
number therefore never comes twice, and no token sampled before a rollback is trained on after it.

Steps count from the start of the run: supervised steps, and versions, which count RL steps and
rollbacks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.checkpoints.recovery import Recovery
from rljax.config.schema import Config, FrequencyConfig
from rljax.engine import Engine, ExportToDirectory
from rljax.errors import GuardrailError, TooManyFailures, UserError
from rljax.metrics.accumulator import Accumulator, PhaseTimer
from rljax.metrics.guard_actions import Decision
from rljax.metrics.guardrails import Breach
from rljax.metrics.mean import Mean, merge
from rljax.oversight import Oversight, counted
from rljax.process import memory
from rljax.process.signals import on_stop_signal
from rljax.process.watchdog import Watchdog
from rljax.rollout.buffer import Buffer, Entry, PromptSource
from rljax.rollout.evaluation import PREFIX, Evaluation, evaluate
from rljax.rollout.journal import Record
from rljax.rollout.limits import limits_of, supervised_total, total_steps
from rljax.rollout.producer import Filter, GroupRunner, Producer, RetryingGenerator
from rljax.rollout.tracker import PromptTracker
from rljax.rollout.workflow import Workflow
from rljax.sinks import RunState, Sink, Status
from rljax.train_step import Learned, learn, supervise
from rljax.types import Group, Prompt, SamplingParams, Trajectory
from rljax.workers.server import Job, WorkerServer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Labeled:
    """Labeled examples for a supervised warm-up or SFT, with a data position of their own."""

    prompts: PromptSource
    encode: Callable[[Prompt], Trajectory]  # makes a labeled example of a prompt


@dataclasses.dataclass(frozen=True)
class Run:
    """Parts that a run is made of. `config` is resolved (rljax/config/io.py)."""

    config: Config
    engine: Engine
    prompts: PromptSource
    workflow: Workflow
    params: SamplingParams
    open_sinks: Callable[[int], Sink]  # takes the number of finished steps; cuts what files say of later steps
    workdir: Path
    accept: Filter = lambda group: True  # rollout.should_accept_fn
    vocab_size: int | None = None  # of the model; None to leave token ids unchecked
    labeled: Labeled | None = None
    evaluation: Evaluation | None = None
    worker_server: WorkerServer | None = None  # leases prompts to rollout workers; None: this process generates
    take_metrics: Callable[[], dict[str, Mean]] = dict  # metrics of the reward processes since the last call


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a run.

    `finished` is False if a signal stopped it. It was saved then, and the same command resumes it.
    """

    step: int
    version: int
    finished: bool


def train(run: Run) -> Outcome:
    """Trains to the end, or until SIGTERM, SIGINT or SIGHUP. Blocks; closes engine and sinks.

    Raises:
      UserError: the input is bad, the checkpoint is another run's, or the disk is full.
      TooManyFailures: `recover.max_consecutive_failures` groups failed in a row.
      GuardrailError: a metric was out of the bounds of `guard`.
    """
    return asyncio.run(Loop(run).run())


class Loop:
    """State of a run between two steps, and the steps themselves."""

    def __init__(self, run: Run) -> None:
        self.parts = run
        self.config = config = run.config
        self.buffer = Buffer(run.prompts, limits_of(config, len(run.prompts)))
        self.recovery = Recovery(config, run.workdir, run.engine.learner, self.buffer)
        self.oversight = Oversight(config, self.recovery.checkpoints)
        self.producer: asyncio.Task[None] | None = None
        self.accumulator = Accumulator()
        self.supervised_steps = 0  # finished
        self.supervised_total = supervised_total(config, len(run.prompts))
        self.stop = asyncio.Event()  # set by a signal
        self.learner_lock = asyncio.Lock()  # taken to change the learner's weights, and to read them
        self.recovered: dict[tuple[str, int], Record] = {}  # groups from the journal of a killed process, by uid and attempt
        self.evaluated: tuple[int, float] | None = None  # step, reward
        self.reported: Counter[str] = Counter()  # buffer.counts as of the last step's metrics
        self.epochs = 0  # finished
        self.last_write = time.perf_counter()  # when a step's metrics were last written
        run.workdir.mkdir(parents=True, exist_ok=True)

    @property
    def step(self) -> int:
        """Number of finished steps, supervised ones included."""
        return self.supervised_steps + self.buffer.version

    async def run(self) -> Outcome:
        run = self.parts
        with Watchdog(self.config.recover.hang_timeout, run.workdir / "hang.txt") as watchdog, on_stop_signal(self._stop):
            self.beat, self.timer = watchdog.beat, PhaseTimer(watchdog.beat)
            try:
                await self._restore()
                self.sinks = run.open_sinks(self.step)
                try:
                    self.oversight.open(run.workdir, self.sinks, self.step)
                    if run.worker_server is not None:
                        await run.worker_server.open()
                    await self._train()
                finally:
                    if run.worker_server is not None:
                        await run.worker_server.close()
                    self.sinks.close()
                    await asyncio.to_thread(self.oversight.close)
            finally:
                self.recovery.close()
                await run.engine.close()
        return Outcome(self.step, self.buffer.version, finished=not self.stop.is_set())

    async def _train(self) -> None:
        self._write_status(RunState.RUNNING)
        try:
            await self._supervise()
            attached = bool(self.config.rollout.addr)  # else the sampler was made with the initial weights
            if (self.step or attached) and not self.stop.is_set():
                await self.parts.engine.publish(self.buffer.version)
            if self.buffer.version == 0:
                await self._evaluate()
            if self.config.actor.loss != "sft":
                await self._reinforce()
            if not self.stop.is_set():
                self.oversight.check_end(self.step)
        except TooManyFailures:
            await self._save(failed=True)
            raise
        except GuardrailError as error:
            await self._save(failed=True)
            raise GuardrailError(f"{error}; {self._resume_hint()}") from None
        await self._evaluate()
        if not self.oversight.is_suspect(self.step):
            await self._save()
        if self.stop.is_set():
            log.warning("stopped at step %d; %s", self.step, self._resume_hint())
            self._write_status(RunState.STOPPED)
            return
        if self.oversight.guardrails.idle:
            log.warning("the run ends with steps from which nothing was learned (rollout/reward, rollout/equal_reward_groups)")
        if self.config.saver.export_final:
            await asyncio.to_thread(self._export)
        self._write_status(RunState.FINISHED)

    async def _supervise(self) -> None:
        """Runs the supervised steps: the warm-up, or all of SFT. Only the learner works."""
        labeled, sft = self.parts.labeled, self.config.actor.loss == "sft"
        if self.supervised_steps >= self.supervised_total:
            return
        if labeled is None:
            raise UserError("warmup.steps: supervised steps need labeled examples (a dataset whose format has answers)")
        size = self.buffer.limits.batch_size if sft else self.config.warmup.batch_size
        while self.supervised_steps < self.supervised_total and not self.stop.is_set():
            prompts = [next(labeled.prompts) for _ in range(size)]
            examples = [Group(prompt.uid, (labeled.encode(prompt),)) for prompt in prompts]
            with self.timer.phase("update"):
                metrics = await asyncio.to_thread(self._learn_supervised, examples)
            self.supervised_steps += 1
            epochs = self.supervised_steps * size // len(labeled.prompts)
            decisions = self.oversight.decide(self.step, metrics, supervised=True)
            self._write(metrics | counted(decision.action for decision in decisions))
            for decision in decisions:
                await self._act(decision)
            if sft and self._due(self.config.evaluator, epochs):
                await self.parts.engine.publish(self.step)
                await self._evaluate()
            if self._due(self.config.saver, epochs) and not self.oversight.guardrails.suspect:
                await self._save()
            self.epochs = epochs
        self.epochs = self.epochs if sft else 0
        if not self.stop.is_set():
            self.oversight.check_end(self.step)
        await self._save()  # version 0 is these weights: a killed run resumes with exactly them

    async def _reinforce(self) -> None:
        """Runs the RL steps: takes a batch and trains on it, until there is none."""
        if self.config.guard.may_roll_back and not self.recovery.checkpoints.steps():
            await self._save()
        self._start_producer()
        try:
            while (entries := await self._take()) is not None:
                await self._step(entries)
        finally:
            await self._stop_producer()

    def _start_producer(self) -> None:
        self.producer = asyncio.create_task(self._produce(), name="producer")

    async def _stop_producer(self) -> None:
        assert self.producer is not None
        self.producer.cancel()
        await asyncio.wait([self.producer])

    async def _take(self) -> list[Entry] | None:
        """Waits for the next batch. Returns None at the end of the data, or after a signal."""
        start, producer = time.perf_counter(), self.producer
        assert producer is not None
        try:
            while not self.stop.is_set():
                if producer.done():
                    producer.result()  # raises the error that ended it
                change = self.buffer.change()
                if (entries := self.buffer.take()) is not None:
                    return entries
                if self.buffer.complete:
                    return None
                await self._wait_for_any(producer, change)
            return None
        finally:
            self.accumulator.count("rollout/wait/learner", time.perf_counter() - start)

    async def _wait_for_any(self, *awaited: asyncio.Future[Any]) -> None:
        """Waits until one of the futures is done.

        The learner is idle meanwhile. A server that restarted without weights gets the current
        ones, because the futures may themselves wait for that server.
        """
        engine = self.parts.engine
        lacking = asyncio.create_task(engine.lacks_weights(), name="lacking weights")
        try:
            while not any(future.done() for future in awaited):
                await asyncio.wait([*awaited, lacking], return_when=asyncio.FIRST_COMPLETED)
                if lacking.done():
                    async with self.learner_lock:
                        await engine.publish(self.step if self.config.actor.loss == "sft" else self.buffer.version)
                    lacking = asyncio.create_task(engine.lacks_weights(), name="lacking weights")
        finally:
            lacking.cancel()

    async def _step(self, entries: Sequence[Entry]) -> None:
        """Trains on one batch: update, publish, metrics, evaluate, save.

        Sampling goes on meanwhile, as far as the lag bound allows.
        """
        engine, version, groups = self.parts.engine, self.buffer.version, [entry.group for entry in entries]
        async with self.learner_lock:
            with self.timer.phase("step"):
                async with engine.learning():
                    learned = await asyncio.to_thread(self._learn, groups, version)
                with self.timer.phase("publish"):
                    await engine.publish(version + 1)
                self.buffer.publish()
        if self.parts.worker_server is not None:
            self.parts.worker_server.weights_changed()
        samples = interleaved(groups, learned.scored.advantage)
        for sample in itertools.islice(samples, self.config.stats_logger.samples_per_step):
            self.sinks.sample(self.step, *sample)
        self.sinks.histograms(self.step, learned.histograms)
        metrics = merge([learned.metrics, self._buffer_metrics(len(groups))])
        events = [breach.event(self.step) for breach in learned.breaches]
        decisions = self.oversight.decide(self.step, metrics, supervised=False)
        self._write(metrics | counted([*(e.action for e in events), *(d.action for d in decisions)]))
        for event in events:
            self.oversight.record_of_update(event)
        for decision in decisions:
            if await self._act(decision):
                return
        epochs = self.buffer.done // len(self.parts.prompts)
        if self._due(self.config.evaluator, epochs):
            await self._evaluate()
        if self._due(self.config.saver, epochs) and not self.oversight.guardrails.suspect:
            await self._save(epochs)
        self.epochs = epochs

    def _learn(self, groups: Sequence[Group], version: int) -> Learned:
        """Records the batch and trains on it. Runs in a thread."""
        step = self.step + 1
        self.oversight.flight.record(step, version, groups, self.oversight.actions.lr_factor)
        on_scored = functools.partial(self.oversight.flight.scored, step)
        return learn(self.parts.engine.learner, self.config, groups, version, self.timer, on_scored)

    def _learn_supervised(self, examples: Sequence[Group]) -> dict[str, Mean]:
        """Takes one supervised step. Runs in a thread."""
        step = self.step + 1
        if self.config.actor.loss == "sft":
            self.oversight.flight.record(step, 0, examples, self.oversight.actions.lr_factor)
        else:
            self.oversight.flight.parent = step  # a warm-up's batches are not recorded: its steps are many and short
        return supervise(self.parts.engine.learner, self.config, [t for group in examples for t in group.trajectories])

    def _stop(self) -> None:
        """Has the run finish its step, save and exit. Called when a signal arrives."""
        self.stop.set()
        self.buffer.wake()

    # Guardrails

    async def _act(self, decision: Decision) -> bool:
        """Does what was decided. Returns whether the run was rolled back.

        Raises:
          GuardrailError: the run has to end.
        """
        breach, action, reason = decision
        line = f"guard.{breach.guard}: {breach.line} ({breach.remedy})"
        if action == "stop":
            self.oversight.record(breach.event(self.step, action, reason))
            raise GuardrailError(f"{line}{reason and ', '}{reason}")
        if action == "rollback":
            await self._roll_back(breach)
            return True
        detail = ""
        if action == "halve_lr":
            self.oversight.actions.lr_factor /= 2
            async with self.learner_lock:
                await self._scale_lr()
            detail = f"the learning rate is {self.oversight.actions.lr_factor:.4g} of its schedule from now on"
        log.warning("%s%s", line, detail and f"; {detail}")
        self.oversight.record(breach.event(self.step, action, detail))
        return False

    async def _roll_back(self, breach: Breach) -> None:
        """Restores learner and data position of an older checkpoint, as a new version; saves them.

        Nothing sampled before it is trained on afterwards. If the process is killed on the way, the
        run resumes from the newest checkpoint, and its guardrails speak again.
        """
        engine, server, bad = self.parts.engine, self.parts.worker_server, self.step
        actions, flight = self.oversight.actions, self.oversight.flight
        await self._save(failed=True)
        if server is None:
            await self._stop_producer()
        async with self.learner_lock:
            async with engine.learning():
                newest = actions.newest_target(breach)
                target, state, entries = await self.recovery.roll_back(self._targets(), newest)
                actions.rolled_back(bad + 1, target)
                await self._scale_lr()
            await engine.publish(self.buffer.version + 1)
            if server is not None:
                server.revoke(self.buffer.version + 1)
            self.recovered.clear()
            self.buffer.roll_back(state["book"], entries)
        self.reported, self.epochs = Counter(self.buffer.counts), state["epochs"]
        self.oversight.forget(target)
        if server is None:
            self._start_producer()
        else:
            server.weights_changed()
        detail = (
            f"back to step {target}, at {actions.lr_factor:.4g} of the learning rate's schedule; the state before is in "
            f"{self.parts.workdir / 'checkpoints' / f'{bad}-failed'}"
        )
        log.warning("guard.%s: %s (%s): %s", breach.guard, breach.line, breach.remedy, detail)
        self.oversight.record(breach.event(bad, "rollback", detail, restored=target), trusted=target)
        await asyncio.to_thread(flight.rolled_back, self.step, target)
        await self._save()
        between = [s for s in self.recovery.checkpoints.steps() if target < s < self.step and s not in flight.held]
        await asyncio.to_thread(self.recovery.checkpoints.delete, between)

    def _targets(self) -> list[int]:
        """Returns the steps to whose checkpoints it may roll back: RL steps that were not undone."""
        steps = self.recovery.checkpoints.steps()
        return [step for step in steps if step >= self.supervised_steps and not self.oversight.actions.was_undone(step)]

    async def _scale_lr(self) -> None:
        await asyncio.to_thread(self.parts.engine.learner.scale_lr, self.oversight.actions.lr_factor)

    def _resume_hint(self) -> str:
        steps = self.recovery.checkpoints.steps()
        failed = self.parts.workdir / "checkpoints" / f"{self.step}-failed"
        kept = f"the state is kept in {failed}, and " if failed.exists() else ""
        return f"{kept}the same command goes on from step {steps[-1]}" if steps else f"{kept}the same command starts over"

    # Sampling

    async def _produce(self) -> None:
        """Generates groups, in this process or in rollout workers, until it is cancelled."""
        worker_server, generator = self.parts.worker_server, self.parts.engine.sampler
        if worker_server is None:
            await self._producer().run()
        else:
            await worker_server.run(Job(self.buffer, self._tracker(), generator, self.accumulator, self._export_between_steps))

    async def _export_between_steps(self, directory: Path) -> int:
        """Exports the policy for the workers' own samplers. Returns its version."""
        async with self.learner_lock:
            await asyncio.to_thread(self.parts.engine.learner.export, ExportToDirectory(directory))
            return self.buffer.version

    def _producer(self) -> Producer:
        """Makes the producer that generates groups in this process."""
        run, config = self.parts, self.config
        generator = RetryingGenerator(
            run.engine.sampler,
            timeout=config.rollout.request_timeout,
            retries=config.rollout.request_retries,
            lost=lambda error: self.accumulator.count(f"rollout/lost/{error.kind}"),
        )
        samples, seed = config.gconfig.n_samples, config.seed
        runner = GroupRunner(run.workflow, generator, run.params, samples, seed, run.accept, run.vocab_size)
        return Producer(runner, self.buffer, self._tracker(), self.accumulator)

    def _tracker(self) -> PromptTracker:
        return PromptTracker(
            self.config,
            buffer=self.buffer,
            journals=self.recovery.journals,
            recovered=self.recovered,
            accumulator=self.accumulator,
            beat=self.beat,
            trace=self.parts.workdir / "trace.jsonl" if self.config.rollout.enable_rollout_tracing else None,
        )

    async def _evaluate(self) -> None:
        """Evaluates at this step, unless that was done already or the run has no evaluations.

        Abandons the evaluation if a signal stops the run.
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
                await self._wait_for_any(work, stop)
                abandoned = not work.done()
            finally:
                stop.cancel()
                if not work.done():
                    work.cancel()
                    await asyncio.wait([work])
            if abandoned:
                return
        metrics = work.result()
        self.evaluated = (self.step, metrics[f"{PREFIX}/reward"].value)
        self._emit(metrics | self.timer.drain())

    async def _save(self, epochs: int | None = None, *, failed: bool = False) -> None:
        labeled = self.parts.labeled
        state: dict[str, Any] = {
            "supervised_steps": self.supervised_steps,
            "labeled": labeled.prompts.state() if labeled else None,
            "accumulator": self.accumulator.state(),
            "written": dict(self.reported),
            "epochs": self.epochs if epochs is None else epochs,
            "guard": self.oversight.actions.state(),
        }
        reward = self.evaluated[1] if self.evaluated and self.evaluated[0] == self.step else math.nan
        with self.timer.phase("save"):
            score = None if math.isnan(reward) else reward
            async with self.learner_lock:
                keep_from = (
                    self.oversight.actions.oldest_target(self.step, self._targets())
                    if self.config.guard.may_roll_back
                    else None
                )
                await self.recovery.save(self.step, state, score=score, failed=failed, keep_from=keep_from)

    async def _restore(self) -> None:
        state, self.recovered = await self.recovery.restore()
        if state is None:
            return
        self.supervised_steps, self.epochs = state["supervised_steps"], state["epochs"]
        if self.parts.labeled and state["labeled"]:
            self.parts.labeled.prompts.restore(state["labeled"])
        self.accumulator.restore(state["accumulator"])
        self.reported = Counter(state["written"])
        if "guard" in state:  # checkpoints from before there were rollbacks lack it
            self.oversight.actions.restore(state["guard"])
            if self.oversight.actions.lr_factor != 1:
                await self._scale_lr()

    def _write(self, metrics: dict[str, Mean]) -> None:
        """Writes a step's metrics, with what was counted and timed since the last step."""
        worker_server = self.parts.worker_server
        counted = [
            self.parts.take_metrics(),
            worker_server.take_metrics() if worker_server else {},
            self.accumulator.drain(),
            self.timer.drain(),
            self._wall_time(),
            _host_memory(),
        ]
        self._emit(merge([metrics, *counted]))
        self._write_status(RunState.RUNNING)

    def _emit(self, metrics: Mapping[str, Mean]) -> None:
        self.sinks.write(self.step, metrics)
        self.oversight.verdicts.write(self.step, metrics)

    def _wall_time(self) -> dict[str, Mean]:
        """Returns the seconds since the last step, with its waits, evaluations and saves."""
        before, self.last_write = self.last_write, time.perf_counter()
        return {"timeperf/wall": Mean(self.last_write - before, 1)}

    def _buffer_metrics(self, groups: int) -> dict[str, Mean]:
        """Returns counts of prompts by outcome since the last step, and of those in flight."""
        buffer, names = self.buffer, ("rejected", "stale", "stale_tokens", "dropped", "again")
        since = {f"rollout/{name}": buffer.counts[name] - self.reported[name] for name in names}
        self.reported = Counter(buffer.counts)
        now = {"rollout/running": buffer.running, "rollout/ready": buffer.ready, "rollout/groups": groups}
        return {name: Mean(float(value), 1) for name, value in (since | now).items()}

    def _due(self, frequency: FrequencyConfig, epochs: int) -> bool:
        """Returns whether something done every few steps or epochs is due after the last step."""
        by_steps = frequency.freq_steps is not None and self.step % frequency.freq_steps == 0
        every = frequency.freq_epochs
        return by_steps or (every is not None and epochs // every > self.epochs // every)

    def _write_status(self, state: RunState) -> None:
        total = total_steps(self.config, len(self.parts.prompts)) + self.buffer.undone
        self.sinks.status(
            Status(state, step=self.step, version=self.buffer.version, total_steps=total, verdict=self.oversight.verdicts.line)
        )

    def _export(self) -> None:
        """Exports the policy to WORKDIR/export as a HF directory, whole or not at all."""
        target, temporary = self.parts.workdir / "export", self.parts.workdir / ".export.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        self.parts.engine.learner.export(ExportToDirectory(temporary))
        shutil.rmtree(target, ignore_errors=True)
        os.rename(temporary, target)


def _host_memory() -> dict[str, Mean]:
    used = memory.resident_bytes()
    return {} if used is None else {"perf/host_memory_bytes": Mean(used, 1)}


def interleaved(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> Iterator[tuple[str, Trajectory, np.ndarray]]:
    """Yields (uid, trajectory, advantage): the first trajectory of each group, then the second, ...

    Args:
      advantages: of the groups' trajectories in order, [T] each.
    """
    following = iter(advantages)
    rounds = itertools.zip_longest(*([(group.uid, t, next(following)) for t in group.trajectories] for group in groups))
    return (sample for several in rounds for sample in several if sample is not None)
