"""Chat template of a model directory: a conversation as text, up to a reply or behind one.

transformers renders it, in its sandbox. What a template has no place for is refused: tools, tool
calls, reasoning, and arguments that it does not read.
"""

from __future__ import annotations

import functools
import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from rljax.chat.control_tokens import ControlTokens, secret
from rljax.chat.messages import REASONING, Message, Tool, text_of
from rljax.errors import UserError

# Arguments of apply_chat_template that are no variables of a template
TAKEN = (
    *("messages", "tools", "conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("sanitize_control_tokens", "tokenizer_kwargs"),
)


class Chat(NamedTuple):
    """A conversation, and what its template gets beside it."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    arguments: Mapping[str, Any] = {}

    def upto(self, count: int) -> Chat:
        """Returns the conversation of the first messages."""
        return self._replace(messages=self.messages[:count])


class ChatTemplate:
    """Renders conversations. The texts have marks of `ControlTokens`, which encodes them."""

    def __init__(self, inner: Any, directory: Path, arguments: Mapping[str, Any], allow_control_tokens: bool) -> None:
        """Takes the template of a tokenizer of transformers.

        Args:
          arguments: variables of every conversation; its own go before them.
          allow_control_tokens: leave the text of users, tools and environments as it is.
        """
        self._inner = inner
        self._directory = directory
        self._arguments = dict(arguments)
        self._allow = allow_control_tokens
        # Stands for an assistant's text, to find it in what a template renders; no text can have it
        self._reply = secret()
        self.source = _source(inner)
        self.control = ControlTokens(inner, self.source)
        names = ("reasoning_content", *REASONING)
        self._reasoning = [name for name in names if re.search(rf"\b{name}\b", self.source)]
        self.has_generation_markers = re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None
        if self.source:
            self._require_arguments(self._arguments, "rollout.chat_template_kwargs")

    def render(self, chat: Chat, *, generation: bool) -> str:
        """Renders a conversation.

        If the template has no system role, the system message is put before the first user turn.

        Args:
          generation: begin the assistant's turn behind it.

        Raises:
          UserError: there is no template, it refuses the messages, or has no place for a part.
        """
        self._require(chat)
        return self._render(self._prepared(chat), add_generation_prompt=generation)

    def render_all(self, chats: Sequence[Chat]) -> list[str]:
        """Renders conversations, with the assistant's turn begun behind each; faster for many.

        Raises UserError if the template refuses one of them.
        """
        texts: dict[int, str] = {}
        alike: dict[str, list[int]] = defaultdict(list)  # by tools and arguments, which are rendered together
        for i, chat in enumerate(chats):
            self._require(chat)
            alike[json.dumps([chat.tools, chat.arguments], default=str) if chat.tools or chat.arguments else ""].append(i)
        for indices in alike.values():
            prepared = [self._prepared(chats[i]) for i in indices]
            whole = prepared[0]._replace(messages=cast(Any, [chat.messages for chat in prepared]))
            texts |= zip(indices, self._rendered(whole, True), strict=True)
        return [texts[i] for i in range(len(chats))]

    def render_open(self, chat: Chat) -> str:
        """Renders a conversation whose last turn, the assistant's, is to be continued.

        The text ends where that turn's text does, or its reasoning if it has no text yet.
        """
        *before, last = chat.messages
        part = "reasoning_content" if last.get("reasoning_content") and not text_of(last) else "content"
        text = last["reasoning_content"] if part == "reasoning_content" else text_of(last)
        marked = chat._replace(messages=[*before, {**last, part: text + self._reply}])
        before_mark, mark, _ = self.render(marked, generation=False).rpartition(self._reply)
        if not mark:
            raise UserError(f"{self._directory}: the chat template leaves out the turn that is to be continued")
        return before_mark

    def render_after_reply(self, chat: Chat, eos: Collection[int]) -> str:
        """Renders what stands between the last assistant's text and the next one.

        Tool calls are a part of the assistant's text, which ends with a token of `eos`.
        """
        reply = max(i for i, message in enumerate(chat.messages) if message["role"] == "assistant")
        while reply and chat.messages[reply - 1]["role"] == "assistant":  # the beginning of a turn that it continued
            chat = chat._replace(messages=[*chat.messages[: reply - 1], *chat.messages[reply:]])
            reply -= 1
        if "tool_calls" in chat.messages[reply]:
            # A template may show a tool's answer only behind its call, or within the assistant's turn
            prompt, ended = self.render(chat.upto(reply), generation=True), self.render(chat.upto(reply + 1), generation=False)
            whole = self.render(chat, generation=True)
            if whole.startswith(ended) and ended.startswith(prompt):
                end = self.control.find(ended[len(prompt) :], eos)
                return whole[len(prompt) + end[0] if end else len(ended) :]
        stand_in = {"role": "assistant", "content": self._reply}
        messages = [*chat.messages[:reply], stand_in, *chat.messages[reply + 1 :]]
        return self._after_reply(self.render(chat._replace(messages=messages), generation=True))

    def render_marked(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Renders a conversation with the positions of what {% generation %} encloses."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self._require(chat)
        prepared = self._prepared(chat)
        texts, positions = self._guarded(
            prepared,
            lambda: render_jinja_template(
                conversations=[[dict(message) for message in prepared.messages]],
                tools=[dict(tool) for tool in prepared.tools] or None,
                chat_template=self._inner.get_chat_template(None, prepared.tools or None),
                return_assistant_tokens_mask=True,
                **{**self._inner.special_tokens_map, **prepared.arguments},
            ),
        )
        return texts[0], [(int(start), int(end)) for start, end in positions[0]]

    def turn_end(self) -> int | None:
        """Returns the special token that the template puts right after an assistant's text."""
        chat = Chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": self._reply}])
        try:
            ids = self.control.encode(self._after_reply(self._render(self._prepared(chat))))
        except UserError:  # a template for one turn only
            return None
        special = {i for i, token in self._inner.added_tokens_decoder.items() if token.special}
        return ids[0] if ids and ids[0] in special else None

    def _after_reply(self, text: str) -> str:
        _, mark, after = text.rpartition(self._reply)
        if not mark:
            raise UserError(f"{self._directory}: the chat template leaves out what an assistant says")
        return after

    def _prepared(self, chat: Chat) -> Chat:
        """Returns what the template sees, with what looks like control tokens disguised."""
        messages, disguise = chat.messages, (lambda value: value) if self._allow else self.control.disguise
        if messages and messages[0]["role"] == "system" and not self._has_system_role:
            messages = _without_system(messages)
        if self._wants_parts:
            messages = [{**m, "content": [{"type": "text", "text": text_of(m)}]} for m in messages]
        # What an assistant says is written with control tokens itself, as <think> and <tool_call>
        if any("tool_calls" in m for m in messages) and self._wants_json_arguments:
            messages = [_with_json_arguments(m) for m in messages]
        plain = [self._with_reasoning(m) if m["role"] == "assistant" else disguise(dict(m)) for m in messages]
        tools = [disguise(dict(tool)) for tool in chat.tools]
        return Chat(plain, tools, {**self._arguments, **disguise(dict(chat.arguments))})

    def _with_reasoning(self, message: Message) -> dict[str, Any]:
        """Returns a message with its reasoning under each name that the template reads."""
        reasoning = {name: message["reasoning_content"] for name in self._reasoning if "reasoning_content" in message}
        return {**message, **reasoning}

    def _render(self, chat: Chat, *, add_generation_prompt: bool = False) -> str:
        return cast(str, self._rendered(chat, add_generation_prompt))

    def _rendered(self, chat: Chat, add_generation_prompt: bool) -> str | list[str]:
        """Renders a conversation, or each of several that are its messages."""
        text = self._guarded(
            chat,
            lambda: self._inner.apply_chat_template(
                chat.messages,
                tools=chat.tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **chat.arguments,
            ),
        )
        return cast(str | list[str], text)

    def _guarded(self, chat: Chat, render: Any) -> Any:
        import jinja2

        try:
            return render()
        except (jinja2.TemplateError, TypeError) as error:  # text joined with something undefined is a TypeError
            roles = ", ".join(message["role"] for message in chat.messages if isinstance(message, Mapping))
            raise _Refused(f"{self._directory}: the chat template refuses messages of roles {roles}: {error}") from error

    @functools.cached_property
    def _has_system_role(self) -> bool:
        """True if the template renders system messages; some raise, some leave them out."""
        text = [{"type": "text", "text": self._reply}] if self._wants_parts else self._reply
        return self._shows([{"role": "system", "content": text}, {"role": "user", "content": "?"}])

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """True if the template takes content in parts only, as those of image-text models do."""
        if self._shows([{"role": "user", "content": self._reply}]):
            return False
        return self._shows([{"role": "user", "content": [{"type": "text", "text": self._reply}]}])

    @functools.cached_property
    def _wants_json_arguments(self) -> bool:
        """True if the template takes the arguments of a tool call as JSON text only."""
        function = {"name": "probe", "arguments": {"probe": self._reply}}
        call = {"id": "probe0000", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        question = {"role": "user", "content": [{"type": "text", "text": "?"}] if self._wants_parts else "?"}
        if self._shows([question, answer]):
            return False
        return self._shows([question, _with_json_arguments(answer)])

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return self._reply in self._render(Chat(messages, arguments=self._arguments), add_generation_prompt=True)
        except UserError:
            return False

    def _require(self, chat: Chat) -> None:
        """Raises UserError for what the template has no place for."""
        if not self.source:
            raise UserError(f"{self._directory}: the tokenizer has no chat template (put one into chat_template.jinja)")
        self._require_arguments(chat.arguments, "chat_template_kwargs")
        shows = {"tools": bool(chat.tools), "tool_calls": any("tool_calls" in m for m in chat.messages)}
        for name, there in shows.items():
            if there and name not in self.source:
                raise UserError(f"{self._directory}: the chat template has no place for {name} (another chat_template.jinja)")
        if any(m.get("reasoning_content") for m in chat.messages) and not self._reasoning:
            raise UserError(
                f"{self._directory}: the chat template has no place for reasoning_content"
                " (content can have it, as the model writes it)"
            )
        if any(not isinstance(m["content"], str) for m in chat.messages):
            raise UserError(f"{self._directory}: a message has a part that is no text, and this tokenizer reads text alone")

    def _require_arguments(self, arguments: Mapping[str, Any], where: str) -> None:
        for name in arguments:
            if name in TAKEN:
                raise UserError(f"{where}.{name}: not for the template: rljax sets it")
            if not re.search(rf"\b{re.escape(name)}\b", self.source):
                raise UserError(f"{where}.{name}: the chat template of {self._directory} does not read it")


class _Refused(UserError):
    """The template raised an error."""


def _source(inner: Any) -> str:
    """Returns the template's source; of several by name, all of them."""
    template = inner.chat_template or ""
    return template if isinstance(template, str) else "\n".join(template.values())


def _with_json_arguments(message: Message) -> Message:
    """Returns a message with the arguments of its tool calls as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _without_system(messages: Sequence[Message]) -> list[Message]:
    system, rest = messages[0], list(messages[1:])
    if rest and rest[0]["role"] == "user":
        first = {**rest[0], "content": f"{text_of(system)}\n\n{text_of(rest[0])}"}
        return [first, *rest[1:]]
    return [{"role": "user", "content": text_of(system)}, *rest]
