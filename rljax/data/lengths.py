"""Lengths of prompts in tokens, as far as they matter: many at once, and none that bytes decide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rljax.chat.messages import text_of
from rljax.chat.pictures import has_pictures
from rljax.data.labeled import bytes_of, shape_of
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer, prompt_ids_of
from rljax.types import Prompt

AT_ONCE = 4096  # prompts that are tokenized together, on all cores


class PromptLengths:
    """Counts tokens of prompts, part after part of a dataset.

    A prompt that must be within the limit, by its bytes, is not tokenized and has length 0. The
    first of each shape always is, for what its chat template refuses; so is one without text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, where: Callable[[int], str], most: int | None, *, every: bool = False
    ) -> None:
        """
        Args:
          tokenizer: None if there is none; then no prompt has a length.
          where: returns the origin of a prompt by its index, for errors.
          most: tokens that a prompt may have; None for any number.
          every: tokenize every prompt, for its length.
        """
        self._tokenizer, self._where, self._most = tokenizer, where, most
        self._every = every
        self._of_shape: dict[str, int] = {}  # tokens of the first prompt of a shape: more than its template alone has

    def of(self, prompts: Sequence[Prompt]) -> list[int]:
        """Returns the tokens of each prompt, or 0.

        Raises UserError, which begins with file and line, for one that the template refuses, or
        that has no tokens.
        """
        if self._tokenizer is None:
            return [0] * len(prompts)
        chosen = [i for i, prompt in enumerate(prompts) if self._may_matter(self._tokenizer, prompt)]
        lengths = dict.fromkeys(range(len(prompts)), 0)
        lengths |= zip(chosen, self._tokenized(self._tokenizer, [prompts[i] for i in chosen]), strict=True)
        return list(lengths.values())

    def _may_matter(self, tokenizer: Tokenizer, prompt: Prompt) -> bool:
        if self._every or has_pictures(prompt.messages) or not any(text_of(message) for message in prompt.messages):
            return True
        if self._most is None and not tokenizer.has_chat_template:
            return False
        shape = shape_of(prompt)
        if shape in self._of_shape:
            return self._most is not None and self._of_shape[shape] + bytes_of(prompt) > self._most
        self._of_shape[shape] = self._tokenized(tokenizer, [prompt])[0]
        return True

    def _tokenized(self, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[int]:
        try:
            lengths = tokenizer.prompt_lengths(prompts)
        except UserError:  # one of them: which?
            lengths = []
            for prompt in prompts:
                with told_where(self._where, prompt):
                    lengths.append(len(prompt_ids_of(tokenizer, prompt)))
        for prompt, tokens in zip(prompts, lengths, strict=True):
            if not tokens:
                reason = "the prompt is empty, and sampling needs a token to begin with (leave it out)"
                raise UserError(f"{self._where(_index_of(prompt))}: {reason}")
        return lengths


@contextlib.contextmanager
def told_where(where: Callable[[int], str], prompt: Prompt) -> Iterator[None]:
    """Puts the origin of a prompt before what is wrong with it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where(_index_of(prompt))}: {error}") from error


def _index_of(prompt: Prompt) -> int:
    return int(prompt.uid.rpartition("/")[2])
