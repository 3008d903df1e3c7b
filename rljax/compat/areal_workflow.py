"""Runs a workflow class of AReaL's as one of rljax's.

theirs                      here
arun_episode(engine, data)  one of the n_samples episodes of a prompt
engine.agenerate            a request to the sampler, with the run's temperature and top_p
data                        the record's fields, and `messages`
gconfig                     the config's, with n_samples 1
reward_fn                   the rewards of the config, called as AReaL calls one
tokenizer                   the one of transformers
the returned dict           a trajectory; scalars of stats_tracker are its components
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.compat.areal import (
    NO_LIMIT,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    recorded,
    recording,
)
from rljax.engine import Generator
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards.score import Rewards, score
from rljax.seeding import turn_seed
from rljax.types import Finish, Prompt, Request, SamplingParams, Trajectory, reward_number

ARRAYS = {"input_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}
INTERACTIONS = "the interactions of its OpenAI client are not supported: return the dict of arrays"


class ArealWorkflow:
    """Workflow that runs the episodes of one of AReaL's.

    Example:

        workflow = ArealWorkflow(MyWorkflow(reward_fn, gconfig, tokenizer), params)
        trajectory = await workflow.episode(generator, prompt, params, seed)
    """

    def __init__(self, theirs: Any, params: SamplingParams, scores_by_rewards: bool = False) -> None:
        """
        Args:
          theirs: an object with `async def arun_episode(self, engine, data)`.
          params: sampling parameters of training, which its requests have.
          scores_by_rewards: whether it was given the rewards of the config.
        """
        self._theirs = theirs
        self._params = params
        self.scores_by_rewards = scores_by_rewards

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory | None:
        engine = EpisodeEngine(generator, prompt, params, self._params, seed)
        data = {"messages": [dict(message) for message in prompt.messages], **prompt.fields}
        with recording(prompt.uid) as record:
            returned = await self._theirs.arun_episode(engine, data)
        if returned is None:
            return None
        try:
            return trajectory_of(returned, record.scalars, engine.finish)
        except ValueError as error:
            raise ValueError(f"the workflow {type(self._theirs).__name__}: {error}") from None


class EpisodeEngine:
    """Engine of one episode, as AReaL's workflows know it."""

    def __init__(
        self, generator: Generator, prompt: Prompt, params: SamplingParams, training: SamplingParams, seed: int
    ) -> None:
        """
        Args:
          params: of this episode: those of training, or of an evaluation.
          training: those that a request has to have, for the workflow was made with them.
        """
        self._generator = generator
        self._prompt = prompt
        self._params = params
        self._training = training
        self._seed = seed
        self._requests = 0
        self.finish = Finish.STOP  # of the last completion

    def get_version(self) -> int:
        return self._generator.version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generates one completion.

        Raises ValueError for sampling parameters that the learner would not know of.
        """
        number, self._requests = self._requests, self._requests + 1
        params = self._params_of(req.gconfig, len(req.input_ids))
        prompt_ids = np.asarray(req.input_ids, np.int32)
        request = Request(f"{self._prompt.uid}#{self._seed}.{number}", prompt_ids, params, turn_seed(self._seed, number))
        completion = await self._generator.generate(request)
        self.finish = completion.finish
        return ModelResponse(
            input_tokens=prompt_ids.tolist(),
            output_tokens=completion.token_ids.tolist(),
            output_logprobs=completion.logp.tolist(),
            output_versions=completion.versions.tolist(),
            stop_reason=completion.finish.value,
            tokenizer=req.tokenizer,
        )

    def _params_of(self, theirs: GenerationHyperparameters, length: int) -> SamplingParams:
        """Converts a request's parameters. The distribution is the run's, or the evaluation's."""
        for name, unused in (("n_samples", 1), ("frequency_penalty", 0.0), ("ignore_eos", False)):
            if getattr(theirs, name) != unused:
                raise ValueError(f"gconfig.{name}={getattr(theirs, name)} of a request is not supported ({unused})")
        for name in ("temperature", "top_p", "greedy"):
            if getattr(theirs, name) != getattr(self._training, name):
                raise ValueError(
                    f"gconfig.{name}={getattr(theirs, name)} of a request, and the learner scores "
                    f"{getattr(self._training, name)} (use the gconfig that the constructor is given, or set gconfig.{name})"
                )
        return SamplingParams(
            max_new_tokens=min(theirs.max_new_tokens, theirs.max_tokens - length),
            min_new_tokens=self._params.min_new_tokens,
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            top_k=self._params.top_k,
            greedy=self._params.greedy,
            stop=tuple(theirs.stop or ()),
            stop_token_ids=tuple(dict.fromkeys([*self._params.stop_token_ids, *theirs.stop_token_ids])),
        )


def trajectory_of(returned: Any, components: Mapping[str, float], finish: Finish) -> Trajectory:
    """Converts what `arun_episode` returned: arrays or tensors [1, T], and rewards [1].

    Raises ValueError that names the entry that is missing, has another shape, or is no number that
    a reward may be.
    """
    if not isinstance(returned, Mapping):
        raise ValueError(f"arun_episode returned {type(returned).__name__}, not a dict of arrays or None")
    missing = [name for name in (*ARRAYS, "rewards") if name not in returned]
    if missing:
        has = ", ".join(map(str, returned))
        raise ValueError(f"arun_episode returned no {missing[0]!r} (it has: {has}; {INTERACTIONS})")
    rows = {name: np.asarray(returned[name]) for name in ARRAYS}
    shape = rows["input_ids"].shape
    if len(shape) != 2 or shape[0] != 1:
        raise ValueError(
            f"input_ids of shape {shape}: an episode returns one sequence, [1, T], and gconfig.n_samples episodes are a group"
        )
    real = np.asarray(returned.get("attention_mask", np.ones(shape))).astype(bool)
    for name, row in (*rows.items(), ("attention_mask", real)):
        if row.shape != shape:
            raise ValueError(f"{name} of shape {row.shape} for input_ids of shape {shape}")
    rewards = np.asarray(returned["rewards"]).reshape(-1)
    if len(rewards) != 1:
        raise ValueError(f"rewards of {len(rewards)} values: an episode has one")
    ids, mask, logp, versions = (rows[name][real].astype(dtype) for name, dtype in ARRAYS.items())
    reward = reward_number("rewards", rewards[0])
    parts = {name: reward_number(f"scalar {name!r}", value) for name, value in components.items() if name != "reward"}
    return Trajectory(ids, mask, np.where(mask, logp, 0), versions, reward, parts, finish)


def build(cls: Any, name: str, tokenizer: Tokenizer, rewards: Rewards, params: SamplingParams, arguments: Any) -> ArealWorkflow:
    """Makes a workflow of a class of AReaL's from what its constructor takes.

    Raises UserError if it takes something that is neither known nor in `arguments`.
    """
    inner = getattr(tokenizer, "transformers", tokenizer)
    known = {"reward_fn": ConfigReward(rewards, tokenizer), "gconfig": _gconfig(params), "tokenizer": inner}
    signature = inspect.signature(cls)
    given = {key: value for key, value in known.items() if key in signature.parameters} | dict(arguments)
    try:
        signature.bind(**given)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        raise UserError(f"rollout.workflow_args: {name}: {error} (it takes: {takes})") from error
    return ArealWorkflow(cls(**given), params, scores_by_rewards="reward_fn" in given and "reward_fn" not in arguments)


def _gconfig(params: SamplingParams) -> GenerationHyperparameters:
    return GenerationHyperparameters(
        max_new_tokens=params.max_new_tokens,
        greedy=params.greedy,
        top_p=params.top_p,
        top_k=params.top_k or NO_LIMIT,
        temperature=params.temperature,
        stop_token_ids=list(params.stop_token_ids),
        stop=list(params.stop) or None,
    )


class ConfigReward:
    """The rewards of the config as a reward function of AReaL's, to be awaited.

    Their components become components of the episode's reward.
    """

    def __init__(self, rewards: Rewards, tokenizer: Tokenizer) -> None:
        self._rewards = rewards
        self._tokenizer = tokenizer

    async def __call__(
        self, prompt: str, completion: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any
    ) -> float:
        """Scores one completion. Raises Rejected, RewardError or RewardTimeout."""
        messages = tuple(data.pop("messages", ())) or ({"role": "user", "content": prompt},)
        record, text = Prompt(recorded().uid, messages, data), self._tokenizer.decode(completion_ids)
        scored = await score(self._rewards, self._tokenizer, record, text, prompt_ids, np.asarray(completion_ids, np.int32))
        recorded().scalars.update(scored.components)
        return scored.reward
