"""Builds the workflow and the sampling parameters that a config names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from rljax.chat.messages import Tool
from rljax.compat import areal_workflow
from rljax.config import registry
from rljax.config.schema import Config, GenerationConfig, RolloutConfig
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.rewards.score import Rewards
from rljax.rollout.workflow import Workflow
from rljax.types import Prompt, SamplingParams

WORKFLOWS = {
    "rlvr": "rljax.workflows.rlvr:RLVR",
    "multi_turn": "rljax.workflows.multi_turn:MultiTurn",
    "environment": "rljax.workflows.environment:EnvironmentWorkflow",
    "tool_use": "rljax.workflows.tool_use:ToolUse",
    "agent": "rljax.workflows.agent:AgentWorkflow",
}


def build_workflow(
    name: str, *, tokenizer: Tokenizer, rewards: Rewards, arguments: Mapping[str, Any], params: SamplingParams | None = None
) -> Workflow:
    """Builds the workflow of `rollout.workflow`, with `rollout.workflow_args`.

    Args:
      params: sampling parameters of training, for a class of AReaL's (one with `arun_episode`).

    Raises:
      UserError: the name is no workflow, or it does not take one of the arguments.
    """
    cls = registry.resolve("rollout.workflow", name, WORKFLOWS, "workflow")
    if hasattr(cls, "episode") and not inspect.isclass(cls):  # an object that a program has made (registry.provide)
        if arguments:
            raise UserError(f"rollout.workflow_args: {name} is made already, and takes none")
        return _checked(name, cls)
    if params is not None and hasattr(cls, "arun_episode") and not hasattr(cls, "episode"):
        return areal_workflow.build(cls, name, tokenizer, rewards, params, arguments)
    try:
        inspect.signature(cls).bind(tokenizer=tokenizer, rewards=rewards, **arguments)
    except TypeError as error:
        takes = ", ".join(p for p in inspect.signature(cls).parameters if p not in ("tokenizer", "rewards")) or "none"
        raise UserError(f"rollout.workflow_args: {name}: {error} (it takes: {takes})") from error
    return _checked(name, cls(tokenizer=tokenizer, rewards=rewards, **arguments))


def workflow_of(config: Config, tokenizer: Tokenizer, rewards: Rewards) -> Workflow:
    """Builds the workflow of a config. Raises as `build_workflow` and `sampling_params`."""
    return build_workflow(
        config.rollout.workflow,
        tokenizer=tokenizer,
        rewards=rewards,
        arguments=config.rollout.workflow_args,
        params=sampling_params(config.gconfig, tokenizer),
    )


def _checked(name: str, workflow: Any) -> Workflow:
    if not inspect.iscoroutinefunction(getattr(workflow, "episode", None)):
        raise UserError(f"rollout.workflow: {name} has no 'async def episode' (see rljax/rollout/workflow.py)")
    return cast(Workflow, workflow)


def tools_of(config: RolloutConfig) -> tuple[Tool, ...]:
    """Returns the definitions of the tools that the workflow of a config adds to each prompt.

    A class of users' has them in a static method `added_tools(**workflow_args)`; prompts are
    opened with them, so that lengths and templates are those that the policy sees.

    Raises UserError for a tool that there is not.
    """
    cls = registry.resolve("rollout.workflow", config.workflow, WORKFLOWS, "workflow")
    added = getattr(cls, "added_tools", None)
    return () if added is None else tuple(added(**config.workflow_args))


def tokens_between(config: RolloutConfig, tokenizer: Tokenizer, prompt: Prompt) -> int | None:
    """Returns how many tokens a workflow of several turns gives between the first two completions.

    A class of users' says so by a static method
    `tokens_between(tokenizer, prompt, **workflow_args)`. None if that is not known before the first
    completion, or there is one turn.
    """
    between = getattr(registry.resolve("rollout.workflow", config.workflow, WORKFLOWS, "workflow"), "tokens_between", None)
    if between is None or config.workflow_args.get("max_turns") == 1:
        return None
    return int(between(tokenizer, prompt, **config.workflow_args))


def check_prompts(workflow: Workflow, prompts: Iterable[Prompt], where: Callable[[str], str]) -> None:
    """Checks that prompts have what a workflow needs of them, as the field of an environment.

    A workflow says what it needs by a method `require(prompt, where)`.

    Args:
      where: returns the origin of a prompt by its uid, as PromptSource.where.

    Raises UserError, which begins with the place of the first prompt that lacks something.
    """
    if (require := getattr(workflow, "require", None)) is not None:
        for prompt in prompts:
            require(prompt, where(prompt.uid))


def scores_by_rewards(workflow: Workflow) -> bool:
    """Returns whether a workflow scores each record by the rewards of the config.

    A class of users' that does says so by `scores_by_rewards = True`; every record is then checked
    at the start for what the rewards read.
    """
    return bool(getattr(workflow, "scores_by_rewards", False))


def sampling_params(config: GenerationConfig, tokenizer: Tokenizer) -> SamplingParams:
    """Converts `gconfig`, with the tokenizer's EOS ids added to the stop ids.

    Raises UserError for a stop id that is no token.
    """
    for token in config.stop_token_ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise UserError(
                f"gconfig.stop_token_ids: {token} is no token (the tokenizer's are 0 to {tokenizer.vocab_size - 1})"
            )
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        greedy=config.greedy,
        stop=config.stop,
        stop_token_ids=tuple(dict.fromkeys([*tokenizer.eos_token_ids, *config.stop_token_ids])),
    )
