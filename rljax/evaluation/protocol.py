"""Protocol of an evaluation: everything but the policy that decides its result, and a digest of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.config.schema import Config, DatasetConfig, RewardConfig
from rljax.hf.tokenizer import Tokenizer, prompt_ids_of
from rljax.types import Prompt

_PROBE = ({"role": "system", "content": "1"}, {"role": "user", "content": "2"})


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Settings of an evaluation. Results compare only under the same protocol."""

    split: str
    prompts: int  # per evaluation
    n_samples: int
    temperature: float
    top_p: float
    top_k: int
    greedy: bool
    max_new_tokens: int
    min_new_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    success: float  # least reward of a sample that passes
    reward: str
    workflow: str
    workflow_args: Mapping[str, object]
    system_prompt: str
    template: str  # digest of a conversation and of the first prompt, as the policy sees them
    data: Mapping[str, object]  # identity of the prompts: digest, number, order

    @property
    def digest(self) -> str:
        """Hash of all settings, as text of 16 characters."""
        text = json.dumps(self.json(), sort_keys=True, allow_nan=False)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def json(self) -> dict[str, Any]:
        """Returns the settings as JSON values."""
        return dict(json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False)))


def protocol_of(
    config: Config, dataset: DatasetConfig, *, prompts: Sequence[Prompt], data: Mapping[str, object], tokenizer: Tokenizer
) -> Protocol:
    """Returns the protocol by which a config evaluates on one of its validation sets.

    Args:
      prompts: prompts of an evaluation.
      data: identity of the prompts, as `PromptSource.identity`.
    """
    judge, sampling = config.evaluator, config.gconfig
    return Protocol(
        split=dataset.split,
        prompts=len(prompts),
        n_samples=judge.n_samples,
        temperature=judge.temperature,
        top_p=judge.top_p,
        top_k=judge.top_k,
        greedy=judge.greedy,
        max_new_tokens=judge.max_new_tokens or sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        success=judge.success,
        reward=_reward_of(config.reward),
        workflow=config.rollout.workflow,
        workflow_args=config.rollout.workflow_args,
        system_prompt=dataset.system_prompt,
        template=template_digest(tokenizer, prompts[:1]),
        data=data,
    )


def _reward_of(reward: RewardConfig) -> str:
    """Returns the names of the rewards, with their weights where there are any."""
    return reward.name if not reward.weights else f"{reward.name} weighted {', '.join(f'{w:g}' for w in reward.weights)}"


def template_digest(tokenizer: Tokenizer, prompts: Sequence[Prompt] = ()) -> str:
    """Hashes the text of a conversation with a system message, and of prompts with their tools.

    The chat template renders them, with the config's and their own arguments.
    """
    probe = tokenizer.decode(tokenizer.apply_chat_template(_PROBE), skip_special_tokens=False)
    texts = [probe, *(tokenizer.decode(prompt_ids_of(tokenizer, p), skip_special_tokens=False) for p in prompts)]
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Returns the settings in which two protocols differ, each as "key: ours, theirs".

    Args:
      ours, theirs: protocols as JSON values, perhaps of another release.
    """
    keys = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    return [f"{key}: {ours.get(key)!r}, {theirs.get(key)!r}" for key in keys]
