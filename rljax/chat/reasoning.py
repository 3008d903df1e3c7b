"""Reasoning in the text of a reply: what stands between `<think>` and `</think>`."""

from __future__ import annotations

from rljax.errors import UserError

START, END = "<think>", "</think>"
REASONING_PARSERS = ("auto", "think", "none")


def has_reasoning(name: str, chat_template: str, key: str = "reasoning_parser") -> bool:
    """Returns whether replies are split into reasoning and content.

    "auto" splits them where the chat template knows the mark. Raises UserError for another name.
    """
    if name not in REASONING_PARSERS:
        raise UserError(f"{key}: no such parser: {name!r} ({', '.join(REASONING_PARSERS)})")
    return name == "think" or (name == "auto" and END in chat_template)


def is_open(prompt_text: str) -> bool:
    """Returns whether a prompt ends inside a block of reasoning, as some templates begin a reply."""
    return prompt_text.rstrip().endswith(START)


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    """Splits a reply, or the beginning of one, into (reasoning, content).

    Reasoning that is not closed is all there is. Blank lines around the marks belong to neither.

    Args:
      opened: the prompt ended inside a block of reasoning.
    """
    head = text.lstrip()
    if head.startswith(START):
        text, opened = head[len(START) :], True
    if not opened:
        return "", text
    reasoning, _, content = text.partition(END)
    return reasoning.strip("\n"), content.lstrip("\n")
