"""Text of a completion as it grows: token ids to the pieces of text that a client is sent."""

from __future__ import annotations

from collections.abc import Sequence

from rljax.chat.reasoning import END, START, split_reasoning
from rljax.hf.tokenizer import HFTokenizer

UNFINISHED = "\ufffd"  # stands for bytes at the end that are no character yet


class GrowingText:
    """Decodes a completion piece by piece, each token about twice whatever the length.

    Example: text.add([12, 40]); text.add([7]); text.so_far
    """

    def __init__(self, tokenizer: HFTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._context, self._read = 0, 0  # ids from which is decoded, and that are in `so_far`
        self.so_far = ""

    def add(self, token_ids: Sequence[int]) -> None:
        self._ids += [int(token) for token in token_ids]
        known = self._decode(self._ids[self._context : self._read])
        whole = self._decode(self._ids[self._context :])
        if len(whole) > len(known) and not whole.endswith(UNFINISHED):
            self.so_far += whole[len(known) :]
            self._context, self._read = self._read, len(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class VisibleText:
    """Splits growing text into reasoning and content, and holds back what may not be either.

    Held back is an end that may be the beginning of a stop string or of a mark of reasoning.
    """

    def __init__(self, stop: Sequence[str], *, reasoning: bool, opened: bool) -> None:
        self._stop, self._reasoning, self._opened = stop, reasoning, opened
        self._sent = ["", ""]  # reasoning, content

    def news(self, text: str, *, last: bool) -> tuple[str, str]:
        """Returns the new (reasoning, content) of a text that has grown.

        Args:
          last: the text is complete, and without a stop string.
        """
        if self._reasoning and not last and not text.strip():
            return "", ""  # reasoning may begin yet
        if not last:
            marks = [*self._stop, *((START, END) if self._reasoning else ())]
            text = text[: len(text) - held_back(text, marks)]
            text = text[: min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=len(text))]
        parts = split_reasoning(text, opened=self._opened) if self._reasoning else ("", text)
        found = []
        for which, part in enumerate(parts):
            if not last and which == 0:
                part = part.rstrip("\n")  # blank lines before the end mark belong to neither
            found.append(part[len(self._sent[which]) :])
            self._sent[which] += found[-1]
        return found[0], found[1]


def held_back(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest end of a text that a mark begins with, but is not all of."""
    most = min(len(text), max((len(mark) - 1 for mark in marks), default=0))
    return next((n for n in range(most, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)
