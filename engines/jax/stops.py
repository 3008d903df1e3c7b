"""Stop strings, found in the text of a completion as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from rljax.tokenizer import Tokenizer

UNFINISHED = "�"  # what a decoder puts for bytes that are no character yet


class StopStrings:
    """Says at which token a completion first contains one of the stop strings.

    A token's text can depend on its neighbours (a leading space, the bytes of one character), so that text is always
    decoded together with the tokens of the piece before it, and a piece ends only where a character does. Special
    tokens count as text here. Only the tail that a match could still begin in is kept.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tail_length = max(map(len, stops)) - 1  # characters
        self._tail = ""
        self._tokens: list[int] = []  # of the piece before, then of this one
        self._before = 0  # how many of them are of the piece before

    def push(self, token_id: int) -> bool:
        """True when the text up to and including this token contains a stop string that it did not contain before."""
        self._tokens.append(token_id)
        before = self._decode(self._tokens[: self._before])
        both = self._decode(self._tokens)
        if both.endswith(UNFINISHED) or len(both) <= len(before):
            return False
        text = self._tail + both[len(before) :]
        self._tokens = self._tokens[self._before :]
        self._before = len(self._tokens)
        self._tail = text[max(0, len(text) - self._tail_length) :]
        return any(stop in text for stop in self._stops)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""
