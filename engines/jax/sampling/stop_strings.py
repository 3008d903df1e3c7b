"""Stop strings, found in the text of a completion as its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence

from rljax.hf.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no character yet, or never will be
LONGEST_CHARACTER = 4  # bytes in UTF-8, so tokens at most


class StopStrings:
    """Says at which token a completion first contains one of the stop strings.

    A token's text can depend on its neighbors (a leading space, the bytes of one character), so
    that text is always decoded together with the tokens of the piece before it, and a piece ends
    only where a character does. Special tokens count as text here. Only the tail that a match
    could still begin in is kept.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tail_length = max(map(len, stops)) - 1  # characters
        self._tail = ""  # of the text of all pieces that have ended
        self._tokens: list[int] = []  # of the piece that ended last, then of the present one
        self._before = 0  # how many of them are of the piece that ended last
        self._searched = 0  # characters of the tail and the present piece that earlier calls have seen

    def push(self, token_id: int) -> bool:
        """True when this token completes a stop string: one that the text before it did not
        contain.
        """
        self._tokens.append(token_id)
        before = self._decode(self._tokens[: self._before])
        both = self._decode(self._tokens)
        text = self._tail + both[len(before) :].rstrip(UNFINISHED)
        found = any(text.find(stop, max(0, self._searched - len(stop) + 1)) >= 0 for stop in self._stops)
        self._searched = max(self._searched, len(text))
        pending = len(self._tokens) - self._before
        if len(both) > len(before) and (not both.endswith(UNFINISHED) or pending >= LONGEST_CHARACTER):
            text = self._tail + both[len(before) :]
            self._tail = text[max(0, len(text) - self._tail_length) :]
            self._tokens, self._before, self._searched = self._tokens[self._before :], pending, len(self._tail)
        return found

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if token_ids else ""
