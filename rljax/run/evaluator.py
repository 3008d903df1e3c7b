"""Evaluations of a run: on all its validation sets at once, one evaluation at a time.

    who                   waits for
    a step                the whole evaluation; nothing with evaluator.overlap
    an evaluation         its episodes, which the sampler generates beside those of training
    the next evaluation   this one

A step's evaluation sees the weights of that step alone, unless it overlaps training: then each
request is answered by the weights there are, and eval-rollout/version says which versions those
were.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from rljax.config.registry import nearest
from rljax.config.validation import best_set
from rljax.errors import UserError
from rljax.evaluation import uses
from rljax.evaluation.results import FOLDER
from rljax.metrics.mean import merge
from rljax.rollout.evaluation import PREFIX, Evaluated, evaluate
from rljax.run.parts import Run


class Evaluator:
    """Runs the evaluations of a run, and keeps the score that a checkpoint is chosen by.

    Example:

        if evaluator.is_new(step):
            evaluator.begin(step)
            await asyncio.wait([evaluator.task])
            evaluated = evaluator.take()
    """

    def __init__(self, run: Run, beat: Callable[[str], None]) -> None:
        self._run, self._beat = run, beat
        judge = run.config.evaluator
        self._is_on = bool(run.evaluations) and (judge.freq_steps is not None or judge.freq_epochs is not None)
        self._metric = (judge.best or f"{PREFIX}/reward").removesuffix("/avg")
        self._step: int | None = None  # of the newest evaluation
        self._score = math.nan  # of that evaluation
        self.task: asyncio.Task[Evaluated] | None = None  # the evaluation that runs

    def is_new(self, step: int) -> bool:
        """Returns whether the run has evaluations and none was begun at this step."""
        return self._is_on and self._step != step

    def score(self, step: int) -> float | None:
        """Returns the score of this step's weights; None if they have none."""
        return self._score if self._step == step and not math.isnan(self._score) else None

    def begin(self, step: int) -> None:
        """Starts the evaluation of the weights after a step, and records this use of the splits."""
        assert self.task is None, "one evaluation at a time"
        self._step, self._score = step, math.nan
        choosing = None if self._run.config.evaluator.best is None else best_set(self._run.config)
        protocols = {each.name: each.protocol for each in self._run.evaluations if each.protocol is not None}
        purposes = {name: "best" if name == choosing else "training" for name in protocols}
        made = [uses.use_of(purposes[name], name, protocol, step=step) for name, protocol in protocols.items()]
        uses.record(self._run.workdir / FOLDER, made)
        self.task = asyncio.create_task(self._evaluate(), name="evaluation")

    async def _evaluate(self) -> Evaluated:
        run = self._run
        several = [evaluate(run.engine.sampler, each, run.config, self._beat) for each in run.evaluations]
        found = await asyncio.gather(*several)
        return Evaluated(merge(each.metrics for each in found), [sample for each in found for sample in each.samples])

    def take(self) -> Evaluated | None:
        """Returns an evaluation that has ended, once; None if there is none.

        Raises UserError if its metrics lack that of `evaluator.best`.
        """
        if self.task is None or not self.task.done():
            return None
        task, self.task = self.task, None
        evaluated = task.result()
        metrics = evaluated.metrics
        if self._metric not in metrics:
            raise UserError(f"evaluator.best: an evaluation has no metric {self._metric!r} ({nearest(self._metric, metrics)})")
        if not self._run.config.evaluator.overlap:
            self._score = metrics[self._metric].value
        return evaluated

    async def abandon(self) -> None:
        """Ends the evaluation that runs, if there is one; its step has no score."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
            self.task = None
