"""The assistant's turns in a rendered conversation: where what is learned of each begins and ends.

A template with {% generation %} says so itself. Of any other, a turn is what the conversation up
to it has behind the prompt before it. This holds in the whole conversation only if the template
goes on with the same text when more turns follow, which is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from absl import logging

from rljax.chat.template import Chat, ChatTemplate
from rljax.errors import UserError


class Turn(NamedTuple):
    """Positions of a turn in a rendered conversation."""

    start: int  # behind the prompt
    end: int  # behind the token that ends the turn
    ended: bool  # False: the template writes no such token


def learned_turns(
    template: ChatTemplate, chat: Chat, opened: str, first: int, eos: Collection[int], *, turns: str
) -> tuple[str, list[Turn]]:
    """Finds what supervised training learns.

    Args:
      chat: the conversation.
      opened: what the prompt is rendered to, with the beginning of the assistant's turn.
      first: index of the first message behind the prompt.
      eos: ids that end a turn.
      turns: the assistant's turns that are learned: "all", those of the "reply", or the "last".

    Returns:
      The rendered conversation up to its last assistant's turn, and the turns in it, in order.

    Raises:
      UserError: a turn cannot be told from the rest, or there is none.
    """
    replies = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant" and i > 0]
    if not replies or replies[-1] < first:
        raise UserError("there is no assistant's turn behind the prompt")
    chat = chat.upto(replies[-1] + 1)
    learned = {"all": replies, "reply": [i for i in replies if i >= first], "last": replies[-1:]}[turns]
    prompts = {i: opened if i == first else template.render(chat.upto(i), generation=True) for i in learned}
    if template.has_generation_markers:
        text, found = _marked(template, chat, prompts, eos)
    else:
        text, found = _compared(template, chat, prompts, eos)
    if not found:
        raise UserError("the chat template shows nothing of the assistant's turn that could be learned")
    if not text.startswith(opened):
        said = opened[_shared(opened, text) :]
        logging.log_first_n(
            logging.WARNING, "the chat template opens %r for sampling, which labeled examples do not have", 1, said
        )
    return text, found


def _marked(template: ChatTemplate, chat: Chat, prompts: Mapping[int, str], eos: Collection[int]) -> tuple[str, list[Turn]]:
    """Returns the turns between {% generation %} and {% endgeneration %}.

    One begins behind the prompt before it, where that reaches into it.
    """
    text, spans = template.render_marked(chat)
    cuts = [_behind(template, prompt, text) for prompt in prompts.values()]
    turns: list[Turn] = []
    for start, end in spans:
        at = next((cut for cut in cuts if start <= cut < end), start)
        over = turns and turns[-1].ended and not text[turns[-1].end : at].strip()  # EOS once more, at the end of everything
        if end > cuts[0] and not over:
            turns.append(_closed(template, text, at, end, eos))
    return text, turns


def _compared(template: ChatTemplate, chat: Chat, prompts: Mapping[int, str], eos: Collection[int]) -> tuple[str, list[Turn]]:
    """Returns the turns by comparing the conversation up to each with the prompt before it."""
    text = template.render(chat, generation=False)
    turns = []
    for i, prompt in prompts.items():
        whole = text if i == len(chat.messages) - 1 else template.render(chat.upto(i + 1), generation=False)
        start = _behind(template, prompt, whole)
        if start < len(prompt):
            start = max(start, _length_before(template, chat, i, whole))
        turn = _closed(template, whole, start, len(whole), eos)
        if whole[: turn.end] != text[: turn.end]:
            raise UserError(
                f"the chat template renders turn {i + 1} in another way when turn {i + 2} follows it, so that what is learned"
                " of it would not be what is sampled (warmup.turns=last learns the last turn alone)"
            )
        turns.append(turn)
    return text, turns


def _length_before(template: ChatTemplate, chat: Chat, reply: int, whole: str) -> int:
    """Returns the length of what stands before a turn and the words that open it."""
    before = template.render(chat.upto(reply), generation=False)
    if not whole.startswith(before):
        raise UserError(f"the chat template renders what stands before turn {reply + 1} in another way when it is answered")
    return len(before)


def _closed(template: ChatTemplate, text: str, start: int, end: int, eos: Collection[int]) -> Turn:
    """Returns a turn up to the first token that ends one, where sampling stops.

    It may stand right behind the text given."""
    found = template.control.find(text[start:], eos)
    if found and start + found[0] <= end:
        return Turn(start, start + found[1], True)
    return Turn(start, end, False)


def _behind(template: ChatTemplate, prompt: str, text: str) -> int:
    """Returns where in a conversation the prompt before a turn ends.

    A prompt may open something, as <think>, that a finished turn does not have.
    """
    shared = _shared(prompt, text)
    return shared if shared == len(prompt) else next((at for at in template.control.breaks(text) if at <= shared), 0)


def _shared(one: str, other: str) -> int:
    """Returns the number of characters with which both texts begin."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
