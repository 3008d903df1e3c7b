"""Recording of a session: every completion with its token ids, log-probs and versions, as a tree.

    turn --> turn --> turn          a conversation: each prompt begins with the tokens so far
         \\-> turn                   a branch: another continuation, as of a sub-agent or of n > 1
    turn                            another conversation, or one whose history was broken

A request goes on from the recorded turn whose messages and reply its messages extend, the longest
first. Its prompt is that turn's tokens and the rendering of what is new: what was sampled is never
tokenized again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.chat.messages import Message, text_of
from rljax.types import Completion, Finish

STYLES = ("concat", "individual")


@dataclasses.dataclass(eq=False)
class Turn:
    """One recorded completion."""

    id: str  # of the reply that the client got
    choice: int  # index among the n choices of that reply
    number: int  # order of the requests in the session
    prompt_ids: np.ndarray  # [P] int32
    completion: Completion
    finish: Finish
    text: str  # of the completion, as the client got it
    parent: Turn | None
    history: History | None = None  # of a chat; None for a completion of text
    prompt_text: str = ""  # of a completion of text
    reward: float | None = None  # its own, without those of later turns

    @property
    def token_ids(self) -> np.ndarray:
        """Prompt and completion, [T] int32: what the next turn begins with."""
        return np.concatenate([self.prompt_ids, self.completion.token_ids])


@dataclasses.dataclass(frozen=True)
class Setting:
    """Arguments of the chat template, beside the messages."""

    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class History:
    """The conversation up to a reply, as it is to be rendered, and as it is compared."""

    messages: tuple[Message, ...]  # of the request, with earlier replies as they were recorded
    reply: Message
    setting: Setting
    keys: tuple[str, ...]  # of the messages and the reply

    @classmethod
    def of(cls, messages: tuple[Message, ...], reply: Message, setting: Setting) -> History:
        return cls(messages, reply, setting, tuple(map(key_of, (*messages, reply))))


class Recording:
    """The turns of one session, in the order of their requests."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.breaks = 0  # prompts that could not go on from the tokens that were sampled

    def add(self, turn: Turn) -> None:
        """Adds a turn. Its prompt begins with its parent's tokens, if it has one."""
        if turn.parent is not None and not np.array_equal(turn.prompt_ids[: len(turn.parent.token_ids)], turn.parent.token_ids):
            raise ValueError(f"the prompt of {turn.id} does not begin with the tokens of {turn.parent.id}")
        self.turns.append(turn)
        self.turns.sort(key=lambda turn: (turn.number, turn.choice))

    def set_reward(self, value: float, turn_id: str | None = None, choice: int = 0) -> None:
        """Sets the own reward of a turn, by default the last. Raises KeyError if there is none."""
        found = self.turns if turn_id is None else [t for t in self.turns if (t.id, t.choice) == (turn_id, choice)]
        if not found:
            raise KeyError(turn_id)
        found[-1].reward = value

    def extended_by(self, messages: Sequence[Message], setting: Setting) -> Turn | None:
        """Returns the turn whose conversation the messages extend; of several the longest, then the
        latest.
        """
        keys = tuple(map(key_of, messages))
        fitting = [
            turn
            for turn in self.turns
            if turn.history is not None
            and turn.history.setting == setting
            and len(turn.history.keys) < len(keys)
            and keys[: len(turn.history.keys)] == turn.history.keys
        ]
        return max(fitting, key=lambda turn: (len(turn.history.keys) if turn.history else 0, turn.number), default=None)

    def diverges(self, messages: Sequence[Message], setting: Setting) -> bool:
        """Returns whether messages that extend no turn are a history that was cut or changed.

        They have a recorded reply among them, or another reply where one was recorded.
        """
        keys = [key_of(message) for message in messages]
        for turn in self.turns:
            if turn.history is None or turn.history.setting != setting:
                continue
            *before, reply = turn.history.keys
            goes_on = keys[: len(before)] == before and len(keys) > len(before)
            if reply in keys or (goes_on and messages[len(before)]["role"] == "assistant"):
                return True
        return False

    def text_extended_by(self, prompt: str | tuple[int, ...]) -> Turn | None:
        """Returns the turn of text whose prompt and completion a later prompt begins with."""
        found = None
        for turn in self.turns:
            if (
                turn.history is None
                and _goes_on(turn, prompt)
                and (found is None or len(turn.token_ids) >= len(found.token_ids))
            ):
                found = turn
        return found


def _goes_on(turn: Turn, prompt: str | tuple[int, ...]) -> bool:
    if isinstance(prompt, str):
        return bool(turn.prompt_text) and prompt.startswith(turn.prompt_text + turn.text)
    ids = turn.token_ids
    return len(prompt) >= len(ids) and bool(np.array_equal(prompt[: len(ids)], ids))


def key_of(message: Message) -> str:
    """Returns what two messages have in common if one is the other, sent back by a client.

    Clients drop reasoning, blanks around replies and the difference between null and "", and may
    number calls anew.
    """
    role, content = message["role"], text_of(message)
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", ())
    ]  # fmt: skip
    if role == "assistant":
        return json.dumps([role, content.strip(), calls], sort_keys=True)
    if not isinstance(message.get("content"), str):
        content = json.dumps(message.get("content"), sort_keys=True)
    return json.dumps([role, content, message.get("name"), message.get("tool_call_id")])
