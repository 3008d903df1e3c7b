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
    save         the save before it; steps go on beside it    the disk
    all of them  at most recover.hang_timeout                 the watchdog, which ends the run
    the end      what is closed, at most two minutes          the watchdog: the run's own status

The producer (run/sampling.py, rollout/producer.py) is a task of the event loop that keeps prompts
in flight; with rollout workers, a server leases the prompts to them instead (workers/). The tracker
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

A guardrail (run/oversight.py) may stop the run, lower the learning rate, or roll back to an older
checkpoint, as a new version (run/interventions.py): a version number never comes twice, and no
token sampled before a rollback is trained on after it.

Steps count from the start of the run: supervised steps, and versions, which count RL steps and
rollbacks.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rljax import tracing
from rljax.checkpoints.loop_state import LoopState
from rljax.checkpoints.recovery import Recovery
from rljax.config.schema import FrequencyConfig
from rljax.engine import ExportToDirectory
from rljax.errors import GuardrailError, TooManyFailures, UserError
from rljax.metrics.accumulator import PhaseTimer
from rljax.metrics.guard_actions import Decision
from rljax.metrics.mean import Mean, merge
from rljax.process.signals import on_stop_signal
from rljax.process.stages import stage
from rljax.rollout.buffer import Buffer, Entry
from rljax.rollout.limits import limits_of, supervised_total
from rljax.rollout.tracker import waiting_in_buffer
from rljax.run import announcement
from rljax.run.ending import Ending
from rljax.run.evaluator import Evaluator
from rljax.run.interventions import Interventions
from rljax.run.oversight import Oversight, counted
from rljax.run.parts import Labeled, Outcome, Run
from rljax.run.reporting import Reporter
from rljax.run.sampling import Sampling
from rljax.sinks import RunState
from rljax.train_step import Learned, learn, supervise
from rljax.types import Group

__all__ = ["Labeled", "Loop", "Outcome", "Run", "train"]

log = logging.getLogger(__name__)


def train(run: Run) -> Outcome:
    """Trains to the end, or until SIGTERM, SIGINT or SIGHUP. Blocks; closes engine and sinks.

    Raises:
      UserError: the input is bad, the checkpoint is another run's, or the disk is full.
      TooManyFailures: `recover.max_consecutive_failures` groups failed in a row.
      GuardrailError: a metric was out of the bounds of `guard`.
      IncompleteRun: the prompts ran out long before the steps that were asked for.
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
        self.reporter = Reporter(run, self.buffer, self.oversight)
        self.ending = Ending(run, self.buffer, self.recovery, self.oversight, self.reporter)
        self.supervised_steps = 0  # finished
        self.supervised_total = supervised_total(config, len(run.prompts))
        self.stop = asyncio.Event()  # set by a signal
        self.learner_lock = asyncio.Lock()  # taken to change the learner's weights, and to read them
        self.epochs = 0  # finished
        self._begun: set[str] = set()  # stages that the loop has been through
        run.workdir.mkdir(parents=True, exist_ok=True)

    @property
    def step(self) -> int:
        """Number of finished steps, supervised ones included."""
        return self.supervised_steps + self.buffer.version

    async def run(self) -> Outcome:
        run = self.parts
        with (
            run.watched() as watchdog,
            on_stop_signal(self._stop) as stop,
            run.traced(),
        ):
            watchdog.watch_tasks()
            watchdog.started()
            self.beat, self.timer = watchdog.beat, PhaseTimer(watchdog.beat)
            self.evaluator = Evaluator(run, watchdog.beat)
            try:
                with stage("reading the checkpoint, or looking for one"):
                    await self._restore()
                with stage("describing the run and opening its files"):
                    self.sinks = run.open_sinks(self.step)
                try:
                    self.reporter.open(self.sinks, self.timer)
                    self.oversight.open(run.workdir, self.sinks, self.step)
                    await self.sampling.open()
                    await self._train()
                finally:
                    watchdog.closing(sys.exception())
                    await self.evaluator.abandon()
                    await self.sampling.close()
                    self.sinks.close()
                    await asyncio.to_thread(self.oversight.close)
            finally:
                watchdog.closing(sys.exception())
                await self.recovery.close()
                await run.engine.close()
        return Outcome(self.step, self.buffer.version, finished=not self.stop.is_set(), stopped_by=stop.number)

    async def _restore(self) -> None:
        """Goes on from the newest checkpoint, if there is one, and makes what depends on it."""
        run, (state, recovered) = self.parts, await self.recovery.restore()
        accumulator, journals, export = self.reporter.accumulator, self.recovery.journals, self._export_between_steps
        self.sampling = Sampling(run, self.buffer, journals, accumulator, recovered=recovered, beat=self.beat, export=export)
        self.interventions = Interventions(
            run, self.buffer, self.recovery, self.oversight, self.sampling, self.reporter, self.learner_lock, self._save
        )
        if state is None:
            return
        self.supervised_steps, self.epochs = state.supervised_steps, state.epochs
        if run.labeled and state.labeled:
            run.labeled.prompts.restore(state.labeled)
        self.reporter.restore(state)
        if self.ending.was_incomplete() and (count := self.buffer.try_again()):
            log.warning("the last %d prompts failed one after the other: they are tried again", count)
        announcement.warn_of_another_rate(
            run, self.buffer, supervised_steps=self.supervised_steps, total_steps=self.reporter.total_steps
        )
        if state.guard is not None:
            self.oversight.actions.restore(state.guard)
            if self.oversight.actions.lr_factor != 1:
                await self.interventions.scale_lr()

    async def _train(self) -> None:
        if self.ending.was_reached(supervised_done=self.supervised_steps >= self.supervised_total):
            self.ending.say_nothing_to_do(self.step)
            return
        self.reporter.status(self.step, RunState.RUNNING)
        try:
            await self._supervise()
            attached = bool(self.config.rollout.addr)  # else the sampler was made with the initial weights
            begins_with_adapter = bool(self.config.actor.lora.path)
            if (self.step or attached or begins_with_adapter) and not self.stop.is_set():
                await self.parts.engine.publish(self.buffer.version)
            if self.buffer.version == 0:
                await self._evaluate(overlap=True)
                if self._may_be_best():
                    await self._save()
            if self.config.actor.loss != "sft":
                await self._reinforce()
            if not self.stop.is_set():
                self.oversight.check_end(self.step)
        except TooManyFailures:
            await self._save(failed=True)
            raise
        except GuardrailError as error:
            await self._save(failed=True)
            raise GuardrailError(f"{error}; {self.recovery.resume_hint(self.step)}") from None
        await self._evaluate()
        if not self.oversight.is_suspect(self.step):
            await self._save(wait=True)
        await self._settle()
        if self.stop.is_set():
            log.warning("stopped at step %d; %s", self.step, self.recovery.resume_hint(self.step))
            self.reporter.status(self.step, RunState.STOPPED)
            return
        await self.ending.export(self.step)
        self.ending.conclude(self.step, self.sampling.first_failure)

    async def _supervise(self) -> None:
        """Runs the supervised steps: the warm-up, or all of SFT. Only the learner works."""
        labeled, sft = self.parts.labeled, self.config.actor.loss == "sft"
        if self.supervised_steps >= self.supervised_total:
            return
        if labeled is None:
            raise UserError("warmup.steps: supervised steps need labeled examples (a dataset whose format has answers)")
        size = self.buffer.limits.batch_size if sft else self.config.warmup.batch_size
        while self.supervised_steps < self.supervised_total and not self.stop.is_set():
            self.recovery.check()
            prompts = [next(labeled.prompts) for _ in range(size)]
            examples = [Group(prompt.uid, (labeled.encode(prompt),)) for prompt in prompts]
            with self.timer.phase("update"), self._first("compiling the supervised step"):
                metrics = await asyncio.to_thread(self._learn_supervised, examples)
            self.supervised_steps += 1
            epochs = self.supervised_steps * size // len(labeled.prompts)
            decisions = self.oversight.decide(self.step, metrics, supervised=True)
            self._write(metrics | counted(decision.action for decision in decisions))
            await self._act(decisions)
            if sft and self._due(self.config.evaluator, epochs):
                await self._await_evaluation()  # it sees no other weights
                await self.parts.engine.publish(self.step)
                await self._evaluate(overlap=True)
            if (self._due(self.config.saver, epochs) or self._may_be_best()) and not self.oversight.guardrails.suspect:
                await self._save()
            await self._export_step()
            self.epochs = epochs
        self.epochs = self.epochs if sft else 0
        if not self.stop.is_set():
            self.oversight.check_end(self.step)
        await self._save(wait=True)  # version 0 is these weights: a killed run resumes with exactly them

    async def _reinforce(self) -> None:
        """Runs the RL steps: takes a batch and trains on it, until there is none."""
        if self.config.guard.may_roll_back and not self.recovery.checkpoints.steps():
            await self._save()
        self.sampling.start()
        try:
            while (entries := await self._take()) is not None:
                await self._step(entries)
        finally:
            await self.sampling.stop()

    async def _take(self) -> list[Entry] | None:
        """Waits for the next batch. Returns None at the end of the data, or after a signal."""
        start, producer = time.perf_counter(), self.sampling.task
        try:
            with tracing.span("wait for a batch", track="loop"), self._first("sampling the first batch"):
                while not self.stop.is_set():
                    self.recovery.check()
                    if producer.done():
                        producer.result()  # raises the error that ended it
                    change = self.buffer.change()
                    if (entries := self.buffer.take()) is not None:
                        for entry in entries:
                            tracing.end(waiting_in_buffer(entry.index), version=self.buffer.version)
                        return entries
                    if self.buffer.complete:
                        return None
                    await self._wait_for_any(producer, change, *filter(None, [self.recovery.saving]))
                return None
        finally:
            self.reporter.accumulator.count("rollout/wait/learner", time.perf_counter() - start)

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
                    with self._first("compiling the update"):
                        learned = await asyncio.to_thread(self._learn, groups, version)
                with self.timer.phase("publish"):
                    await engine.publish(version + 1)
                self.buffer.publish()
        self.sampling.published()
        self.reporter.samples(self.step, groups, learned.scored.advantage)
        self.sinks.histograms(self.step, learned.histograms)
        metrics = merge([learned.metrics, self.reporter.buffer_metrics(len(groups))])
        events = [breach.event(self.step) for breach in learned.breaches]
        decisions = self.oversight.decide(self.step, metrics, supervised=False)
        self._write(metrics | counted([*(e.action for e in events), *(d.action for d in decisions)]))
        for event in events:
            self.oversight.record_of_update(event)
        if await self._act(decisions):
            return
        epochs = self.buffer.done // len(self.parts.prompts)
        if self._due(self.config.evaluator, epochs):
            await self._evaluate(overlap=True)
        self._report_evaluation()
        if (self._due(self.config.saver, epochs) or self._may_be_best()) and not self.oversight.guardrails.suspect:
            await self._save(epochs)
        await self._export_step()
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

    def _first(self, what: str) -> AbstractContextManager[None]:
        """Returns the context of a stage that is said the first time alone, if it takes long."""
        is_first = what not in self._begun
        self._begun.add(what)
        return stage(what) if is_first else nullcontext()

    def _stop(self) -> None:
        """Has the run finish its step, save and exit. Called when a signal arrives."""
        log.warning("stopping: this step is finished and saved first; again to stop now")
        self.stop.set()
        self.buffer.wake()

    async def _act(self, decisions: Sequence[Decision]) -> bool:
        """Does what was decided about the last step. Returns whether the run was rolled back."""
        for decision in decisions:
            if (epochs := await self.interventions.act(decision, self.step)) is not None:
                self.epochs = epochs
                return True
        return False

    async def _export_between_steps(self, directory: Path) -> int:
        """Exports the policy for the workers' own samplers. Returns its version."""
        async with self.learner_lock:
            await asyncio.to_thread(self.parts.engine.learner.export, ExportToDirectory(directory))
            return self.buffer.version

    async def _evaluate(self, *, overlap: bool = False) -> None:
        """Evaluates at this step, unless that was done already or the run has no evaluations.

        Args:
          overlap: return at once if the config wants evaluations to overlap training.
        """
        self._report_evaluation()
        if self.stop.is_set():
            return
        if self.evaluator.is_new(self.step):
            await self._await_evaluation()
            if self.stop.is_set():
                return
            self.evaluator.begin(self.step)
        if not (overlap and self.config.evaluator.overlap):
            await self._await_evaluation()

    async def _await_evaluation(self) -> None:
        """Waits for the evaluation that runs, if any. Abandons it if a signal stops the run."""
        if self.evaluator.task is None:
            return
        with self.timer.phase("evaluate"), self._first("evaluating"):
            stop = asyncio.create_task(self.stop.wait())
            try:
                await self._wait_for_any(self.evaluator.task, stop)
            finally:
                stop.cancel()
                if not self.evaluator.task.done():
                    await self.evaluator.abandon()
        self._report_evaluation()

    def _report_evaluation(self) -> None:
        """Writes an evaluation that has ended; its metrics are with those of the last step."""
        if (evaluated := self.evaluator.take()) is not None:
            self.reporter.evaluated(self.step, evaluated)
            self.reporter.add(self.step, evaluated.metrics | self.timer.drain())

    async def _save(self, epochs: int | None = None, *, failed: bool = False, wait: bool = False) -> None:
        """Saves the run as it is now; the write goes on beside the following steps, unless `wait`."""
        with self.timer.phase("save"):
            await self._settle()
            async with self.learner_lock:
                score, keep_from = self.evaluator.score(self.step), self.interventions.keep_from(self.step)
                await self.recovery.save(
                    self.step, self._state(epochs), score=score, failed=failed, keep_from=keep_from, wait=wait
                )

    def _state(self, epochs: int | None) -> LoopState:
        """Returns the loop's own state for a checkpoint."""
        labeled = self.parts.labeled
        return LoopState(
            supervised_steps=self.supervised_steps,
            epochs=self.epochs if epochs is None else epochs,
            labeled=labeled.prompts.state() if labeled else None,
            accumulator=self.reporter.accumulator.state(),
            written=self.reporter.reported(),
            guard=self.oversight.actions.state(),
        )

    async def _settle(self) -> None:
        """Waits until the newest checkpoint is whole. Raises the error of a save that has failed."""
        with self.timer.phase("save_wait"):
            await self.recovery.settle()

    def _may_be_best(self) -> bool:
        """Returns whether this step has a score, and the best checkpoint is wanted."""
        return self.config.evaluator.best is not None and self.evaluator.score(self.step) is not None

    def _write(self, metrics: Mapping[str, Mean]) -> None:
        """Writes a step's metrics, with what was counted and timed since the last step."""
        self.reporter.write(self.step, metrics, self.sampling.take_metrics() | self.recovery.take_metrics())

    def _due(self, frequency: FrequencyConfig, epochs: int) -> bool:
        """Returns whether something done every few steps or epochs is due after the last step."""
        by_steps = frequency.freq_steps is not None and self.step % frequency.freq_steps == 0
        every = frequency.freq_epochs
        return by_steps or (every is not None and epochs // every > self.epochs // every)

    async def _export_step(self) -> None:
        """Exports the policy of this step, if `saver.export_freq_steps` says so."""
        every = self.config.saver.export_freq_steps
        if every and self.step % every == 0:
            async with self.learner_lock:
                await asyncio.to_thread(self.ending.export_to, f"exports/{self.step}")
