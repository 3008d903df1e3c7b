"""Labeled examples for supervised training: a prompt, and the reply that is learned behind it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator

from rljax.chat.messages import text_of
from rljax.config.schema import WarmupConfig
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.rollout.trajectories import supervised_turns
from rljax.types import Prompt, Trajectory

KEPT_TOKENS = 2_000_000  # of examples that later epochs need again; 13 bytes each
ANSWER = "answer"  # the field that holds the text of a record's own reply


def labeled_trajectory(prompt: Prompt, tokenizer: Tokenizer, field: str = ANSWER, *, turns: str = "all") -> Trajectory:
    """Makes a supervised trajectory: the conversation with its reply, as the chat template has it.

    The reply is the record's own, with its tool calls and reasoning, or else the text of a field.

    Args:
      turns: the assistant's turns that are learned: "all", those of the "reply", or the "last".

    Raises:
      UserError: the prompt has no such field, or the template refuses the conversation.
    """
    reply = prompt.reply if field == ANSWER else ()
    if not reply and field not in prompt.fields:
        raise UserError(
            f"warmup.field: prompt {prompt.uid} has no field {field!r} to train on (its fields: {', '.join(prompt.fields)})"
        )
    reply = reply or ({"role": "assistant", "content": str(prompt.fields[field])},)
    return supervised_turns(*tokenizer.encode_labeled(prompt, reply, turns=turns))


def labeled(prompts: Iterable[Prompt], tokenizer: Tokenizer, field: str = ANSWER) -> Iterator[Trajectory]:
    """Yields trajectories for supervised training; endless if the prompts are."""
    return (labeled_trajectory(prompt, tokenizer, field) for prompt in prompts)


class Labels:
    """Makes labeled examples of prompts, and measures them before anything starts."""

    def __init__(self, warmup: WarmupConfig, tokenizer: Tokenizer, *, most: int, why: str) -> None:
        """Takes what is learned of an example, and how long one may be.

        Args:
          most: tokens that an example may have.
          why: the setting that limits it, as the end of an error.
        """
        self._warmup = warmup
        self._tokenizer = tokenizer
        self.most = most
        self.why = why
        self._kept: dict[str, tuple[Prompt, Trajectory]] = {}  # by index in the dataset, the first to be made first
        self._kept_tokens = 0

    @property
    def identity(self) -> list[str | int]:
        """Settings that decide which examples fit."""
        return [self._warmup.field, self._warmup.turns, self.most]

    def __call__(self, prompt: Prompt) -> Trajectory:
        """Makes the labeled example of a prompt, or returns that of the record's earlier epochs."""
        index = prompt.uid.rpartition("/")[2]
        known = self._kept.get(index)
        if known is not None and dataclasses.replace(known[0], uid=prompt.uid) == prompt:  # another dataset may have it too
            return known[1]
        if known is not None:
            self._drop(index)
        self._kept[index] = prompt, self._made(prompt)
        self._kept_tokens += len(self._kept[index][1])
        while self._kept_tokens > KEPT_TOKENS and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))
        return self._kept[index][1]

    def _drop(self, index: str) -> None:
        self._kept_tokens -= len(self._kept.pop(index)[1])

    def _made(self, prompt: Prompt) -> Trajectory:
        return labeled_trajectory(prompt, self._tokenizer, self._warmup.field, turns=self._warmup.turns)

    def require(self, prompt: Prompt, where: str) -> None:
        """Raises UserError for a prompt without a reply, or without the text to learn in its place."""
        field = self._warmup.field
        if not (field == ANSWER and prompt.reply) and not isinstance(prompt.fields.get(field), str | int | float):
            has = ", ".join(prompt.fields) or "none"
            raise UserError(f"warmup.field: {where} has no text {field!r} to train on (its fields: {has})")

    def measure(self) -> Callable[[Prompt], int]:
        """Returns a function that measures an example in tokens, if it may be too long.

        An example that must fit, by its bytes, is not tokenized, and has length 0.
        """
        of_template: dict[str, int] = {}  # tokens of the first example of a shape: more than its template alone has

        def length(prompt: Prompt) -> int:
            shape = shape_of(prompt)
            size = bytes_of(prompt) + len(str(prompt.fields.get(self._warmup.field, "")).encode())
            if shape in of_template and of_template[shape] + size <= self.most:
                return 0
            tokens = len(self._made(prompt))
            of_template.setdefault(shape, tokens)
            return tokens

        return length


def shape_of(prompt: Prompt) -> str:
    """Returns what a chat template tells examples apart by, beside their texts."""
    messages = (*prompt.messages, *prompt.reply)
    keys = [[message["role"], *sorted(message.keys() - {"role", "content"})] for message in messages]
    return json.dumps([keys, bool(prompt.tools), {key: str(item) for key, item in prompt.chat_template_kwargs.items()}])


def bytes_of(prompt: Prompt) -> int:
    """Returns the bytes of a prompt's and its reply's text, with tools and calls as JSON.

    A token is at least a byte, so that there are no more tokens beside the chat template's own.
    """
    messages = (*prompt.messages, *prompt.reply)
    beside = [{key: item for key, item in message.items() if key not in ("role", "content")} for message in messages]
    parts = [*prompt.tools, *filter(None, beside)]
    texts = [text_of(message) for message in messages] + [json.dumps(part, ensure_ascii=False) for part in parts]
    return sum(len(text.encode()) for text in texts)
