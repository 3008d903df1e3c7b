"""Stand-ins for parts of a run, each with one bug.

A plant is a public function of a run's parts that returns them with one exchanged. The product's
code stays as it is: the stand-in passes on whatever it has no bug in.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.batching.batch import Batch
from rljax.config.allocation import Pool
from rljax.engine import Generator, WeightsInMemory, WeightSource
from rljax.engines.jax.sampling.sampler import JaxSampler
from rljax.errors import EpisodeError
from rljax.experiments.bench.run_library.rewards import ByAnswer
from rljax.hf.spec import CONFIG
from rljax.hf.tokenizer import load_tokenizer
from rljax.loop import Run
from rljax.metrics.mean import Mean
from rljax.types import PROMPT_VERSION, Completion, Prompt, Request, SamplingParams, Trajectory
from rljax.workflows.rlvr import RLVR

Plant = Callable[[Run], Run]


class StandIn:
    """Passes everything on to the part it stands for."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


# Learners ----------------------------------------------------------------------------------------------------------------


class ChangedBatches(StandIn):
    """Learner whose update gets other batches than it should.

    Args:
      change: function of (the number of updates so far, batch).
    """

    def __init__(self, part: Any, change: Callable[[int, Batch], Batch]) -> None:
        super().__init__(part)
        self._change = change
        self._updates = 0

    def update(self, batch: Batch) -> dict[str, Mean]:
        metrics: dict[str, Mean] = self._part.update(self._change(self._updates, batch))
        self._updates += 1
        return metrics


class ChangedReturns(StandIn):
    """Learner whose critic has other targets than it should.

    Args:
      change: function of (batch, returns [R, T]).
    """

    def __init__(self, part: Any, change: Callable[[Batch, np.ndarray], np.ndarray]) -> None:
        super().__init__(part)
        self._change = change

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        assert batch.returns is not None
        metrics: dict[str, Mean] = self._part.update_critic(batch.replace(returns=self._change(batch, batch.returns)))
        return metrics


class Repeated(StandIn):
    """Learner that trains several times on every minibatch."""

    TIMES = 8

    def update(self, batch: Batch) -> dict[str, Mean]:
        for _ in range(self.TIMES - 1):
            self._part.update(batch)
        metrics: dict[str, Mean] = self._part.update(batch)
        return metrics


class Leaking(StandIn):
    """Learner that keeps 24 MB of every update."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._kept: list[np.ndarray] = []

    def update(self, batch: Batch) -> dict[str, Mean]:
        self._kept.append(np.ones(3_000_000))
        metrics: dict[str, Mean] = self._part.update(batch)
        return metrics


class Forgetful(StandIn):
    """Learner whose optimizer begins anew with every update: moments of 0, that have seen no step."""

    def update(self, batch: Batch) -> dict[str, Mean]:
        phase = self._part._reinforcement().actor
        phase.load(jax.tree.map(jnp.zeros_like, phase.saved()))
        metrics: dict[str, Mean] = self._part.update(batch)
        return metrics


def reversed_loss(run: Run) -> Run:
    return _with_batches(run, lambda _, batch: batch.replace(advantage=-batch.advantage))


def advantages_of_others(run: Run) -> Run:
    """Gives every trajectory the advantage of the one before it in the batch."""
    return _with_batches(run, lambda _, batch: batch.replace(advantage=of_others(batch, batch.advantage)))


def not_a_number(run: Run) -> Run:
    """Makes one advantage of each batch NaN, from the 40th update on."""

    def change(updates: int, batch: Batch) -> Batch:
        if updates < 40:
            return batch
        advantage = batch.advantage.copy()
        advantage[tuple(np.argwhere(batch.loss_mask)[0])] = np.nan
        return batch.replace(advantage=advantage)

    return _with_batches(run, change)


def gradient_spikes(run: Run) -> Run:
    """Multiplies the advantages of one update in 15 by ten thousand."""

    def change(updates: int, batch: Batch) -> Batch:
        return batch.replace(advantage=batch.advantage * 1e4) if updates % 15 == 14 else batch

    return _with_batches(run, change)


def repeated_updates(run: Run) -> Run:
    return _with_learner(run, Repeated(run.engine.learner))


def leaking_learner(run: Run) -> Run:
    return _with_learner(run, Leaking(run.engine.learner))


def forgetful_optimizer(run: Run) -> Run:
    return _with_learner(run, Forgetful(run.engine.learner))


def returns_of_others(run: Run) -> Run:
    """Gives the critic, for every trajectory, the returns of the one before it in the batch."""
    return _with_returns(run, of_others)


def returns_x100(run: Run) -> Run:
    return _with_returns(run, lambda _, returns: returns * 100)


def of_others(batch: Batch, values: np.ndarray) -> np.ndarray:
    """Returns `values` of the trajectory before, at its last token: [R, T], 0 where not trained."""
    places = [
        (row, segment)
        for row, segments in enumerate(batch.segment_ids)
        for segment in np.unique(segments[batch.loss_mask[row]]).tolist()
    ]
    of_each = [(batch.segment_ids[row] == segment) & batch.loss_mask[row] for row, segment in places]
    last = [values[row, np.flatnonzero(tokens)[-1]] for (row, _), tokens in zip(places, of_each, strict=True)]
    moved = np.zeros_like(values)
    for (row, _), tokens, value in zip(places, of_each, [last[-1], *last[:-1]], strict=True):
        moved[row, tokens] = value
    return moved


def _with_batches(run: Run, change: Callable[[int, Batch], Batch]) -> Run:
    return _with_learner(run, ChangedBatches(run.engine.learner, change))


def _with_returns(run: Run, change: Callable[[Batch, np.ndarray], np.ndarray]) -> Run:
    return _with_learner(run, ChangedReturns(run.engine.learner, change))


def _with_learner(run: Run, learner: Any) -> Run:
    return dataclasses.replace(run, engine=dataclasses.replace(run.engine, learner=learner))


# Samplers ----------------------------------------------------------------------------------------------------------------


class SkippedPublishes(StandIn):
    """Sampler that takes the new version's number and keeps its weights, but for every n-th time."""

    def __init__(self, part: Any, every: int | None) -> None:
        super().__init__(part)
        self._every = every
        self._source: WeightSource | None = None

    async def load_weights(self, source: WeightSource, version: int) -> None:
        if self._source is None or (self._every and version % self._every == 0):
            self._source = source
        await self._part.load_weights(self._source, version)


class Quantized(StandIn):
    """Sampler whose weights have 3 bits, by a scale per row of each matrix."""

    async def load_weights(self, source: WeightSource, version: int) -> None:
        assert isinstance(source, WeightsInMemory)
        await self._part.load_weights(WeightsInMemory(jax.tree.map(_three_bits, source.params)), version)


class SlowsDown(StandIn):
    """Sampler whose requests wait for five seconds once version 25 is reached."""

    async def generate(self, request: Request) -> Completion:
        if self._part.version >= 25:
            await asyncio.sleep(5.0)
        completion: Completion = await self._part.generate(request)
        return completion


def never_published(run: Run) -> Run:
    return _with_sampler(run, SkippedPublishes(run.engine.sampler, None))


def rarely_published(run: Run) -> Run:
    return _with_sampler(run, SkippedPublishes(run.engine.sampler, 15))


def quantized_sampler(run: Run) -> Run:
    return _with_sampler(run, Quantized(run.engine.sampler))


def slowing_sampler(run: Run) -> Run:
    return _with_sampler(run, SlowsDown(run.engine.sampler))


def other_rope_base(run: Run) -> Run:
    """Makes the sampler from a config.json whose rotary embeddings have another base."""
    directory = run.workdir / "sampler_model"
    shutil.copytree(Path(run.config.actor.path), directory, dirs_exist_ok=True)
    spec = json.loads((directory / CONFIG).read_text())
    for fields in (spec, spec.get("rope_parameters") or {}):
        if "rope_theta" in fields:
            fields["rope_theta"] = 20.0
    (directory / CONFIG).write_text(json.dumps(spec))
    return _with_sampler(run, JaxSampler(run.config, Pool("jax"), directory))


def other_temperature(run: Run) -> Run:
    """Samples at a temperature of which the learner does not know."""
    return dataclasses.replace(run, params=dataclasses.replace(run.params, temperature=1.5))


def _three_bits(weights: jax.Array) -> jax.Array:
    if weights.ndim < 2:
        return weights
    scale = jnp.maximum(jnp.max(jnp.abs(weights), axis=-1, keepdims=True), 1e-8) / 3
    return (jnp.round(weights / scale) * scale).astype(weights.dtype)


def _with_sampler(run: Run, sampler: Any) -> Run:
    return dataclasses.replace(run, engine=dataclasses.replace(run.engine, sampler=sampler))


# Workflows and evaluations -----------------------------------------------------------------------------------------------


class TrainedPrompts(StandIn):
    """Workflow that marks the prompt as sampled: its tokens have the completion's version, and 0
    for a log-prob.
    """

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        done: Trajectory | None = await self._part.episode(generator, prompt, params, seed)
        if done is None:
            return None
        mask = np.arange(len(done)) > 0
        first = int(done.versions[done.loss_mask][0])
        versions = np.where(mask & (done.versions == PROMPT_VERSION), first, done.versions)
        return dataclasses.replace(done, loss_mask=mask, versions=versions.astype(np.int32))


class OneSeed(StandIn):
    """Workflow whose samples of a prompt all have the same seed."""

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        done: Trajectory | None = await self._part.episode(_SeedOfPrompt(generator), prompt, params, seed)
        return done


class OneOfGroup(StandIn):
    """Workflow that gives up all episodes of a prompt but the first."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._begun: set[tuple[str, int]] = set()  # prompts by uid, and the version of the weights

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        key = prompt.uid, generator.version
        if key in self._begun:
            return None
        self._begun.add(key)
        done: Trajectory | None = await self._part.episode(generator, prompt, params, seed)
        return done


class _SeedOfPrompt(Generator):
    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    @property
    def version(self) -> int:
        return self._generator.version

    async def generate(self, request: Request) -> Completion:
        seed = zlib.crc32(np.asarray(request.prompt_ids, np.int32).tobytes()) % 2**31
        return await self._generator.generate(dataclasses.replace(request, seed=seed))


class Failing(StandIn):
    """Workflow that fails where the answer has three digits."""

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        if len(str(prompt.fields["answer"])) > 2:
            raise EpisodeError(f"prompt {prompt.uid}: the sandbox has no memory left")
        done: Trajectory | None = await self._part.episode(generator, prompt, params, seed)
        return done


def trained_prompts(run: Run) -> Run:
    return dataclasses.replace(run, workflow=TrainedPrompts(run.workflow))


def one_seed(run: Run) -> Run:
    return dataclasses.replace(run, workflow=OneSeed(run.workflow))


def one_of_group(run: Run) -> Run:
    return dataclasses.replace(run, workflow=OneOfGroup(run.workflow))


def failing_evaluations(run: Run) -> Run:
    return dataclasses.replace(
        run, evaluations=[dataclasses.replace(each, workflow=Failing(each.workflow)) for each in run.evaluations]
    )


def evaluated_by_answer(run: Run) -> Run:
    """Evaluates by the right answer, whatever the reward pays for."""
    workflow = RLVR(load_tokenizer(Path(run.config.actor.path)), ByAnswer())
    return dataclasses.replace(run, evaluations=[dataclasses.replace(each, workflow=workflow) for each in run.evaluations])


PLANTS: Mapping[str, Plant] = {
    plant.__name__: plant
    for plant in (
        *(reversed_loss, advantages_of_others, not_a_number, gradient_spikes, repeated_updates, leaking_learner),
        *(forgetful_optimizer, one_of_group),
        *(returns_of_others, returns_x100, never_published, rarely_published, quantized_sampler, slowing_sampler),
        *(other_rope_base, other_temperature, trained_prompts, one_seed, failing_evaluations, evaluated_by_answer),
    )
}
