"""Prompts and replies of a chat: messages to token ids, and sampled ids to a message."""

from __future__ import annotations

import dataclasses
import json
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.agents.recording import Recording, Setting, Turn
from rljax.chat.control_tokens import secret
from rljax.chat.messages import Message
from rljax.chat.reasoning import has_reasoning, is_open, split_reasoning
from rljax.chat.tool_calls import ToolCallParser, find_parser
from rljax.hf.tokenizer import HFTokenizer
from rljax.types import Completion, Finish, SamplingParams

# Placeholders for what was sampled, to find it in a rendered conversation
_CONTENT, _REASONING = secret(), secret()


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a request."""

    token_ids: np.ndarray  # [P] int32
    parent: Turn | None  # the recorded turn that it goes on from
    messages: tuple[Message, ...]  # of the request, with earlier replies as they were recorded
    opened: bool  # it ends inside a block of reasoning
    broken: bool  # it should have gone on from a recorded turn, and could not


class Dialogue:
    """The chat template of a model, and the notations of its replies."""

    def __init__(self, tokenizer: HFTokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        """
        Raises:
          UserError: no parser has this name.
        """
        self.tokenizer = tokenizer
        self.calls: ToolCallParser = find_parser(tool_parser, tokenizer.chat_template)
        self.has_reasoning = has_reasoning(reasoning_parser, tokenizer.chat_template)

    # Prompts

    def prompt(self, recording: Recording, messages: Sequence[Message], setting: Setting) -> ChatPrompt:
        """Returns the prompt of a request: the tokens so far and what is new, or a new rendering.

        It is rendered anew if the messages extend no recorded turn, or if the chat template renders
        the earlier turns otherwise now than when they were sampled, as templates do that drop the
        reasoning of earlier turns.

        Raises:
          UserError: the template refuses the messages.
        """
        turn = recording.extended_by(messages, setting)
        if turn is not None and turn.history is not None:
            history = turn.history
            whole = (*history.messages, history.reply, *messages[len(history.keys) :])
            new = self._continuation(turn, whole)
            if new is not None:
                ids = np.concatenate([turn.token_ids, np.array(new, np.int32)])
                return ChatPrompt(ids, turn, whole, self._is_open(whole, setting), broken=False)
        broken = turn is not None or recording.diverges(messages, setting)
        ids = np.array(
            self.tokenizer.apply_chat_template(messages, tools=setting.tools, chat_template_kwargs=setting.template_kwargs),
            np.int32,
        )
        return ChatPrompt(ids, None, tuple(messages), self._is_open(messages, setting), broken)

    def _continuation(self, turn: Turn, whole: Sequence[Message]) -> list[int] | None:
        """Returns the ids from the end of a turn to the start of the next reply.

        Returns None if the template does not render the turn's prompt as the beginning of the
        conversation, or leaves out the reasoning of its reply.
        """
        assert turn.history is not None
        setting, end = turn.history.setting, len(turn.history.messages)
        if any(message["role"] == "assistant" for message in whole[end + 1 :]):
            return None
        reasoning = bool(turn.history.reply.get("reasoning_content"))
        mark: Message = {"role": "assistant", "content": _CONTENT} | ({"reasoning_content": _REASONING} if reasoning else {})
        marked = [*whole[:end], mark, *whole[end + 1 :]]
        before, found, _ = self._render(marked, setting).partition(_CONTENT)
        prompt = self._render(turn.history.messages, setting)
        if not found or not before.startswith(prompt) or (_REASONING in before) != reasoning:
            return None
        if not reasoning and before != prompt:
            return None
        last = int(turn.completion.token_ids[-1])
        return self.tokenizer.next_turn(marked, last, tools=setting.tools, chat_template_kwargs=setting.template_kwargs)

    def _render(self, messages: Sequence[Message], setting: Setting) -> str:
        return self.tokenizer.render(messages, setting.tools, setting.template_kwargs)

    def _is_open(self, messages: Sequence[Message], setting: Setting) -> bool:
        return self.has_reasoning and is_open(self._render(messages, setting))

    # Replies

    def text(self, completion: Completion, params: SamplingParams) -> str:
        """Returns the text of a completion, without the id or the string that ended it."""
        ids = completion.token_ids.tolist()
        if completion.finish is Finish.STOP and ids and ids[-1] in params.stop_token_ids:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=not self.calls.special)
        return cut_at(text, params.stop) if completion.finish is Finish.STOP else text

    def reply(self, text: str, prompt: ChatPrompt, *, calls_tools: bool) -> Message:
        """Returns the message that a completion's text is."""
        reasoning, content = split_reasoning(text, opened=prompt.opened) if self.has_reasoning else ("", text)
        content, calls = self.calls.parse(content) if calls_tools else (content, [])
        message: dict[str, Any] = {"role": "assistant", "content": content.strip() if calls else content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {
                    "id": call_id(self.calls.id_length),
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in calls
            ]
        return message


def cut_at(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string in it."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def call_id(length: int | None) -> str:
    """Makes the id of a tool call, of so many letters and digits if the template demands them."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def to_openai(message: Message) -> dict[str, Any]:
    """Returns a reply as OpenAI's API has it: arguments of calls are JSON text, no content is null."""
    found: dict[str, Any] = {"role": "assistant", "content": message["content"] or None, "refusal": None}
    if "reasoning_content" in message:
        found["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_openai_call(call) for call in calls]
    else:
        found["content"] = message["content"]
    return found


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}
