"""Tool use: a reply with tool calls is answered by the tools, until there is one without.

prompt --> completion --> calls --> results --> completion --> ... --> answer --> reward
given      sampled                  given       sampled                sampled
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rljax.chat.messages import Message, Tool, joined_tools
from rljax.chat.reasoning import has_reasoning, split_reasoning
from rljax.chat.tool_calls import AUTO, ToolCall, find_parser
from rljax.config import arguments
from rljax.engine import Generator
from rljax.hf.tokenizer import HFTokenizer
from rljax.rewards.score import Rewards
from rljax.rollout.trajectories import Episode
from rljax.tools import CallOutcome, Toolbox, make_tools
from rljax.types import CONTEXT_FULL, Completion, Finish, Prompt, SamplingParams, Trajectory
from rljax.workflows.turns import generate_next_turn, generate_turn

DEFAULT_TOOLS = ("calculator",)
CALL_ID = 9  # characters of the ids of tool calls: some templates ask for just so many


class ToolUse:
    """Lets the policy call tools before it answers.

    An episode ends with the first reply that calls no tool, after `max_turns` replies, when a reply
    is cut short, or where the context has no room for another. The reward scores the last reply
    without its reasoning. Components are "turns", "context_full" (it had no room), "tool_calls",
    and for each kind of failed call (`CallOutcome`) their number; the policy sees the reason of a
    failure in place of the result.

    Args:
      tools: names of rljax/tools/toolbox.py, or "package.module:function" of functions with type
        hints and a docstring, or of a `Tool`.
      tool_args: keyword arguments of rljax's own tools, by name.
      tool_parser, reasoning_parser: notations of calls and reasoning in a reply; "auto" follows the
        chat template.
      max_tokens: an episode that has this many tokens gets no further turn; None for no limit.
      tool_timeout: seconds for each call.
      max_output: characters of a result that the policy sees.
    """

    def __init__(
        self,
        tokenizer: HFTokenizer,
        rewards: Rewards,
        *,
        tools: Sequence[str] = DEFAULT_TOOLS,
        tool_args: Mapping[str, Mapping[str, Any]] = {},
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        max_turns: int = 4,
        max_tokens: int | None = None,
        tool_timeout: float = 30.0,
        max_output: int = 8192,
    ) -> None:
        arguments.check(
            "rollout.workflow_args",
            max_turns=(max_turns, arguments.COUNT),
            max_tokens=(max_tokens, arguments.COUNT),
            tool_timeout=(tool_timeout, arguments.SECONDS),
            max_output=(max_output, arguments.COUNT),
        )
        key = "rollout.workflow_args"
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._toolbox = Toolbox(make_tools(tools, tool_args), timeout=tool_timeout, max_output=max_output)
        self._parser = find_parser(tool_parser, tokenizer.chat_template, f"{key}.tool_parser")
        self._reasons = has_reasoning(reasoning_parser, tokenizer.chat_template, f"{key}.reasoning_parser")
        self._max_turns = max_turns
        self._max_tokens = max_tokens

    @staticmethod
    def added_tools(
        tools: Sequence[str] = DEFAULT_TOOLS, tool_args: Mapping[str, Mapping[str, Any]] = {}, **_: Any
    ) -> tuple[Tool, ...]:
        """Returns the definitions of the tools that prompts have in an episode, beside their own."""
        return Toolbox(make_tools(tools, tool_args)).definitions

    async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> Trajectory:
        prompt = dataclasses.replace(prompt, tools=joined_tools(prompt.tools, self._toolbox.definitions))
        messages = list(prompt.messages)
        episode = Episode(self._tokenizer.encode_prompt(prompt))
        outcomes: Counter[CallOutcome] = Counter()
        turn, full = 0, False
        completion = await generate_turn(generator, prompt, episode, params, seed, turn)
        while True:
            turn += 1
            content, calls = self._parse(completion)
            over = self._is_over(turn, completion, len(episode.token_ids) + len(completion.token_ids))
            if calls and completion.finish is Finish.STOP:
                completion = dataclasses.replace(completion, finish=Finish.TOOL_CALLS)
            episode.sampled(completion)
            if over or not calls:
                break
            messages += [self._reply(content, calls), *await self._answer(calls, outcomes)]
            following = await generate_next_turn(generator, self._tokenizer, prompt, episode, messages, params, seed, turn)
            if full := following is None:
                break
            completion = following
        score = await self._rewards.score(prompt, content)
        components = {**score.components, **_counts(turn, outcomes), CONTEXT_FULL: float(full)}
        return episode.trajectory(score.reward, components)

    def _parse(self, completion: Completion) -> tuple[str, list[ToolCall]]:
        """Returns a reply's text, without reasoning and calls, and its calls."""
        ids = completion.token_ids
        if completion.finish is Finish.STOP and len(ids) and int(ids[-1]) in self._tokenizer.eos_token_ids:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=not self._parser.special)
        if self._reasons:
            text = split_reasoning(text, opened=False)[1]
        return self._parser.parse(text)

    def _reply(self, content: str, calls: Sequence[ToolCall]) -> Message:
        """Returns the assistant's message, with its calls where the template has a place for them.

        Such a template may show an answer only behind its call.
        """
        if "tool_calls" not in self._tokenizer.chat_template:
            return {"role": "assistant", "content": content}
        called = [
            {"id": _call_id(i), "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for i, call in enumerate(calls)
        ]
        return {"role": "assistant", "content": content, "tool_calls": called}

    async def _answer(self, calls: Sequence[ToolCall], outcomes: Counter[CallOutcome]) -> list[Message]:
        """Makes the calls of one reply, side by side, and returns the tools' messages."""
        results = await asyncio.gather(*(self._toolbox.call(call.name, call.arguments) for call in calls))
        outcomes.update(result.outcome for result in results)
        return [
            {"role": "tool", "tool_call_id": _call_id(i), "name": call.name, "content": result.content}
            for i, (call, result) in enumerate(zip(calls, results, strict=True))
        ]

    def _is_over(self, turn: int, completion: Completion, length: int) -> bool:
        return (
            turn >= self._max_turns
            or completion.finish is not Finish.STOP
            or (self._max_tokens is not None and length >= self._max_tokens)
        )


def _call_id(index: int) -> str:
    return f"{index:0{CALL_ID}d}"


def _counts(turns: int, outcomes: Counter[CallOutcome]) -> dict[str, float]:
    failures = {str(kind): float(outcomes[kind]) for kind in CallOutcome if kind is not CallOutcome.OK}
    return {"turns": float(turns), "tool_calls": float(outcomes.total()), **failures}
