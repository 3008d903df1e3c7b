"""Environments of the package verifiers, played by an agent over the OpenAI endpoint.

    config.rollout.workflow = "agent"
    config.rollout.workflow_args.agent = "rljax.environments.verifiers:play"
    config.train_dataset.path = "task:verifiers/NAME"     # as verifiers.load_environment(NAME)
    config.train_dataset.task.KEYWORD = ...               # its arguments

The environment asks its client, an unmodified `openai.AsyncOpenAI`, for each completion, and its
rubric gives the reward; what the policy sampled is trained on as that of any agent.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

from rljax.errors import AgentError, UserError
from rljax.types import Prompt

FIELD = "verifiers"  # the field of a prompt that names its environment and has its row of the dataset
REMEDY = "pip install 'rljax[verifiers]'"
TRAIN = "train"


def examples(name: str, split: str, *, n: int = -1, seed: int | None = None, **arguments: Any) -> list[dict[str, Any]]:
    """Makes the records of an environment's dataset; of a split but train, those of its evaluation.

    Args:
      n: number of examples; -1 for all.
      seed: shuffles them; None for their own order.
      arguments: of the environment's `load_environment`.

    Raises:
      UserError: no such environment or argument, or it has no dataset of conversations.
    """
    environment = _load(name, json.dumps(arguments, sort_keys=True))
    rows = environment.get_dataset(n, seed) if split == TRAIN else environment.get_eval_dataset(n, seed)
    return [_record(name, arguments, json.loads(json.dumps(row, default=str))) for row in rows]


def _record(name: str, arguments: Mapping[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    messages = row.get("prompt")
    if not isinstance(messages, list):
        raise UserError(f"verifiers: {name}: its prompts are not conversations (message_type 'chat' makes such)")
    field = {"name": name, "arguments": dict(arguments), "row": row}
    return {"messages": messages, "answer": str(row.get("answer", "")), FIELD: field}


async def play(client: Any, model: str, prompt: Prompt) -> dict[str, float]:
    """Plays an episode of the prompt's environment. Returns its reward and its metrics.

    Raises:
      UserError: the prompt names no environment.
      AgentError: the environment ended with an error of its own.
    """
    given = prompt.fields.get(FIELD)
    if not isinstance(given, Mapping):
        raise UserError(f"prompt {prompt.uid}: no field {FIELD!r} (train_dataset.path=task:verifiers/NAME makes such prompts)")
    environment = _load(given["name"], json.dumps(given["arguments"], sort_keys=True))
    from verifiers import OpenAIChatCompletionsClient

    # The run's sampling parameters stand at the endpoint; None leaves out one that the environment sets by itself
    unset = dict.fromkeys(("temperature", "top_p", "max_tokens"))
    output = await environment.run_rollout(given["row"], OpenAIChatCompletionsClient(client), model, unset)
    if output.get("error"):
        raise AgentError(f"prompt {prompt.uid}: {given['name']}: {' '.join(str(output['error']).split())}"[:2000])
    metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items() if math.isfinite(value)}
    return {**metrics, "reward": float(output["reward"])}


@functools.lru_cache(maxsize=16)
def _load(name: str, arguments: str) -> Any:
    """Loads an environment, once per process. Raises UserError."""
    try:
        import verifiers
    except ImportError as error:
        raise UserError(f"verifiers: {error} ({REMEDY})") from error
    try:
        environment = verifiers.load_environment(name, **json.loads(arguments))
    except Exception as error:  # the environment's code may raise anything
        reason = " ".join(str(error).split())
        raise UserError(f"verifiers: {name}: {type(error).__name__}: {reason}"[:500]) from error
    if not inspect.iscoroutinefunction(getattr(environment, "run_rollout", None)):
        raise UserError(f"verifiers: {name}: load_environment returned {type(environment).__name__}, not an Environment")
    return environment
