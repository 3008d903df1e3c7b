"""The assistant's turns in a rendered conversation: where what is learned of each begins and ends.

A template with {% generation %} says so itself. Of any other, a turn is what the conversation up
to it has behind the prompt before it. This holds in the whole conversation only if the template
goes on with the same text when more turns follow, which is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rljax.errors import UserError
from rljax.hf.chat_template import Chat, ChatTemplate


class Turn(NamedTuple):
    """Positions of a turn in a rendered conversation."""

    start: int  # behind the prompt
    end: int  # behind the token that ends the turn
    ended: bool  # False: the template writes no such token


def learned_turns(
    template: ChatTemplate, chat: Chat, opened: str, first: int, eos: Collection[int], *, every_turn: bool
) -> tuple[str, list[Turn]]:
    """Finds what supervised training learns.

    Args:
      chat: the conversation.
      opened: what the prompt is rendered to, with the beginning of the assistant's turn.
      first: index of the first message behind the prompt.
      eos: ids that end a turn.
      every_turn: also the assistant's turns of the prompt.

    Returns:
      The rendered conversation up to its last assistant's turn, and the turns in it, in order.

    Raises:
      UserError: a turn cannot be told from the rest, or there is none.
    """
    replies = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant" and i > 0]
    if not replies or replies[-1] < first:
        raise UserError("there is no assistant's turn behind the prompt")
    chat = chat.upto(replies[-1] + 1)
    if template.has_generation_markers:
        text, turns = _marked(template, chat, opened, eos, every_turn)
    else:
        text = template.render(chat, generation=False)
        turns = list(_compared(template, chat, text, opened, first, replies if every_turn else _from(replies, first), eos))
    turns = [turn for turn in turns if text[turn.start : turn.end].strip() or not turn.ended]
    if not turns:
        raise UserError("the chat template shows nothing of the assistant's turn that could be learned")
    return text, turns


def _from(indices: Sequence[int], first: int) -> list[int]:
    return [i for i in indices if i >= first]


def _marked(template: ChatTemplate, chat: Chat, opened: str, eos: Collection[int], every_turn: bool) -> tuple[str, list[Turn]]:
    """Returns the turns between {% generation %} and {% endgeneration %}.

    The last one begins behind the prompt, where the prompt reaches into it.
    """
    text, spans = template.render_marked(chat)
    shared = _shared(opened, text)
    turns = []
    for start, end in spans:
        if start < shared == len(opened) < end:
            start = shared
        if every_turn or end > shared:
            turns.append(_closed(template, text, start, end, eos))
    return text, turns


def _closed(template: ChatTemplate, text: str, start: int, end: int, eos: Collection[int]) -> Turn:
    """Returns a turn up to the last token that ends one: in the text given, or right behind it."""
    inside = template.control.last(text[start:end], eos)
    if inside:
        return Turn(start, start + inside, True)
    behind = template.control.first(text, end, eos)
    return Turn(start, behind or end, bool(behind))


def _compared(
    template: ChatTemplate, chat: Chat, text: str, opened: str, first: int, replies: Sequence[int], eos: Collection[int]
) -> Iterator[Turn]:
    """Yields the turns by comparing the conversation up to each with the prompt before it."""
    for i in replies:
        prompt = opened if i == first else template.render(chat.upto(i), generation=True)
        whole = text if i == len(chat.messages) - 1 else template.render(chat.upto(i + 1), generation=False)
        start = _shared(prompt, whole)
        if start < len(prompt):  # the prompt opens something, as <think>, that a finished turn does not have
            start = next((at for at in template.control.breaks(whole) if at <= start), 0)
        inside = template.control.last(whole[start:], eos)
        turn = Turn(start, start + inside, True) if inside else Turn(start, len(whole), False)
        if whole[: turn.end] != text[: turn.end]:
            raise UserError(
                f"the chat template renders turn {i + 1} in another way when turn {i + 2} follows it, so that what is learned"
                " of it would not be what is sampled (warmup.turns=reply learns the last turn alone)"
            )
        yield turn


def _shared(one: str, other: str) -> int:
    """Returns the number of characters with which both texts begin."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
