"""The engines' side of experiments.parity: learners and samplers as a run makes them.

Everything goes through public methods. The gradient of a tensor is read from Adam's first moment
after one step, which is (1 - beta1) times it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from rljax.config.allocation import Pool
from rljax.config.schema import OptimizerConfig
from rljax.engine import ExportToDirectory, Learner, PortableState
from rljax.engine.plugins import find_plugin
from rljax.experiments.certificate.case import Case, Result, Tensors, Update, Vector
from rljax.metrics.mean import Mean
from rljax.objective.spec import PREFIX
from rljax.types import Completion, Request, SamplingParams

NEW_TOKENS = 16  # of a completion that a sampler is asked for


class Certified(Learner, Protocol):
    """A learner that shows its state by Hugging Face names."""

    def named_state(self) -> dict[str, dict[str, np.ndarray]]: ...

    def load_named_state(self, named: PortableState, updates: int) -> None: ...


def run(engine: str, case: Case, export_to: Path | None = None) -> Result:
    """Makes an engine's learner, with the weights of the case, and takes a step of each part.

    Args:
      export_to: directory for the policy as it was before the step.
    """
    made = find_plugin(engine).make_learner(case.config, Pool(engine), case.model_dir)
    learner = cast(Certified, made)  # the two learners of this package, which are `PhasedLearner`s, do
    try:
        _load(learner, case)
        if export_to is not None:
            learner.export(ExportToDirectory(export_to))
        logp = case.trained(learner.score(case.batch))
        values, critic = None, None
        if case.config.actor.adv_estimator == "gae":
            values = case.trained(learner.values(case.batch))
            critic = _critic_update(learner, case)
        policy, means = _policy_update(learner, case)
        reference = case.trained(learner.score_reference(case.batch)) if case.config.actor.kl_ctl > 0 else None
        return Result(logp, policy, reference, values, critic, means[f"{PREFIX}/grad_norm"].value)
    finally:
        learner.close()


def _load(learner: Certified, case: Case) -> None:
    """Gives the learner the weights of the case."""
    state = learner.named_state()
    for part in ("params", "critic/params"):
        if part in state:
            state[part] = {name: case.weights(part, name, array) for name, array in state[part].items()}
    learner.load_named_state(state, 0)


def _policy_update(learner: Certified, case: Case) -> tuple[Update, dict[str, Mean]]:
    before = learner.named_state()["params"]
    means = learner.update(case.batch)
    after = learner.named_state()
    entropy = means.get(f"{PREFIX}/entropy")
    update = Update(
        loss=means[f"{PREFIX}/loss"].value,
        gradients=_gradients(after["mu"], case.config.actor.optimizer),
        entropy=None if entropy is None else entropy.value,
        step={name: after["params"][name] - before[name] for name in before},
    )
    return update, means


def _critic_update(learner: Certified, case: Case) -> Update:
    means = learner.update_critic(case.batch)
    gradients = _gradients(learner.named_state()["critic/mu"], case.config.critic.optimizer)
    return Update(means["critic/loss"].value, gradients)


def _gradients(moment: Tensors, optimizer: OptimizerConfig) -> Tensors:
    return {name: array.astype(np.float64) / (1 - optimizer.beta1) for name, array in moment.items()}


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Completions that a sampler drew, and the log-probs that it gave."""

    sequences: list[np.ndarray]  # [T] int32: prompt and completion
    prompts: list[int]  # tokens of the prompt of each
    logp: Vector  # of the completions' tokens


def sample(engine: str, case: Case, model_dir: Path) -> Sampled:
    """Draws completions, several at once, with an engine's sampler of an exported policy.

    Only the temperature is the config's: log-probs are those of the learner's distribution.
    """
    prompts = [t.token_ids[: max(len(t) // 4, 1)] for t in case.trajectories]
    completions = asyncio.run(_completions(engine, case, model_dir, prompts))
    return Sampled(
        [np.concatenate([p, c.token_ids]) for p, c in zip(prompts, completions, strict=True)],
        [len(p) for p in prompts],
        np.concatenate([c.logp for c in completions]).astype(np.float64),
    )


class Scorer(Protocol):
    """The oracle, or the same in another dtype."""

    def sequence_logp(self, token_ids: np.ndarray, start: int) -> Vector: ...


def scored(sampled: Sampled, oracle: Scorer) -> Vector:
    """Scores what a sampler drew. Returns log-probs of the completions' tokens."""
    drawn = zip(sampled.sequences, sampled.prompts, strict=True)
    return np.concatenate([oracle.sequence_logp(sequence, prompt) for sequence, prompt in drawn])


async def _completions(engine: str, case: Case, model_dir: Path, prompts: Sequence[np.ndarray]) -> list[Completion]:
    plugin = find_plugin(engine)
    room = (plugin.context_length(case.config) or 2**30) - max(map(len, prompts))
    params = SamplingParams(max(min(NEW_TOKENS, room), 1), temperature=case.config.gconfig.temperature)
    sampler = await asyncio.to_thread(plugin.make_sampler, case.config, Pool(engine), model_dir)
    try:
        requests = [Request(str(i), prompt, params, case.config.seed + i) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*map(sampler.generate, requests))
    finally:
        await sampler.close()
