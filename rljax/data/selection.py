"""Selection of the examples that are used: those that are short enough. Every one is read."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from rljax.chat.messages import text_of
from rljax.config.schema import DatasetConfig
from rljax.data.labeled import Labels
from rljax.data.lengths import AT_ONCE, PromptLengths, told_where
from rljax.data.remembered import LEAST, Memory, Selected
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.types import Prompt


class Examples(Protocol):
    """Prompts by index, each with the place it came from."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...

    def where(self, index: int) -> str: ...


log = logging.getLogger(__name__)

AHEAD = 2  # parts of the prompts that are measured at once


class Selection:
    """Examples that are used, and how many of the others were left out for what."""

    def __init__(
        self,
        examples: Examples,
        dataset: DatasetConfig,
        tokenizer: Tokenizer | None,
        labels: Labels | None,
        key: str,
        identity: str | None = None,
        *,
        measure: bool = False,
        seen: Callable[[Prompt], None] | None = None,
    ) -> None:
        """Selects the first `limit` examples that are not too long.

        One prompt of each shape is rendered, so that a chat template refuses at the start what it
        will not take. Of a large data set the selection is remembered.

        Args:
          identity: of the examples; None if nothing tells them from others.
          measure: find the length of every prompt, even of one that bytes decide.
          seen: called with each prompt that is used, in order.

        Raises:
          UserError: begins with file and line.
        """
        if dataset.max_length is not None and tokenizer is None:
            raise ValueError(f"{key}.max_length counts tokens and needs a tokenizer")
        if dataset.limit is not None and dataset.limit < 1:
            raise UserError(f"{key}.limit: {dataset.limit} leaves no example (at least 1, or None)")
        self._examples = examples
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._labels = labels
        self._key = key
        self.count = len(examples) if dataset.limit is None else min(len(examples), dataset.limit)
        self.long_prompts = 0
        self.long_examples = 0  # with their answers
        self._strange: list[tuple[int, str]] = []  # examples with a character that has no token
        self._measure = measure and tokenizer is not None
        self._seen = seen
        selected = self._recall(identity)
        if selected is None:
            found = list(self._select())
            kept, lengths = np.array([index for index, _ in found], np.int64), np.array([n for _, n in found], np.int32)
            said = self.long_prompts, self.long_examples, tuple(self._strange)
            selected = Selected(kept, *said, lengths if self._measure else None)
            if (memory := self._memory(identity, self._measure)) is not None:
                memory.keep(selected)
        elif seen is not None:
            for index in selected.kept.tolist():
                seen(examples[index])
        self.lengths = selected.lengths if measure else None  # [n] int32 tokens, if they were asked for
        self.kept = selected.kept  # [n] indices of the examples, rising
        self.long_prompts, self.long_examples, self._strange = (
            selected.long_prompts,
            selected.long_examples,
            [*selected.strange],
        )
        if not len(self.kept):
            self._refuse()

    @property
    def skipped(self) -> int:
        """Number of examples that are left out for their length."""
        return self.count - len(self.kept)

    def _recall(self, identity: str | None) -> Selected | None:
        """Returns this selection as it is remembered, be it with lengths that are not asked for."""
        for measured in (True,) if self._measure else (True, False):
            memory = self._memory(identity, measured)
            if memory is not None and (selected := memory.recall()) is not None:
                return selected
        return None

    def _memory(self, identity: str | None, measured: bool) -> Memory | None:
        """Returns the place of this selection; None if it is not worth one."""
        if identity is None or self.count < LEAST:
            return None
        labels = None if self._labels is None else self._labels.identity
        tokenizer = None if self._tokenizer is None else self._tokenizer.digest
        return Memory(
            {
                "examples": identity,
                "count": self.count,
                "max_length": self._dataset.max_length,
                "tokenizer": tokenizer,
                "labels": labels,
                "measured": measured,
            }
        )

    def log(self) -> None:
        """Says what was left out, and which characters the policy can't see.

        With labels, what is said of the prompts themselves was said when they were opened without.
        """
        if self.long_prompts and not self._labels:
            most = self._dataset.max_length
            log.warning("%s: %d of %d prompts are longer than %s tokens", self._key, self.long_prompts, self.count, most)
        if self.long_examples and self._labels:
            said = self._key, self.long_examples, self.count, self._labels.why
            log.warning("%s: %d of %d examples are left out with their answers: %s", *said)
        if self._strange and not self._labels:
            index, character = self._strange[0]
            more = f", as {len(self._strange) - 1} more prompts have such" if len(self._strange) > 1 else ""
            where = self._examples.where(index)
            log.warning("%s: the model's tokenizer has no token for %r%s: the policy can't see it", where, character, more)

    def _select(self) -> Iterator[tuple[int, int]]:
        """Yields the index of each example that is used, and the tokens of its prompt.

        They are 0 where bytes decided that it fits.
        """
        length_of_example = self._labels.measure() if self._labels else lambda prompt: 0
        most_of_prompt = self._dataset.max_length
        for start, prompts, lengths in self._measured():
            strange = self._unknown_characters(prompts)
            for index, (prompt, tokens) in enumerate(zip(prompts, lengths, strict=True), start):
                if self._labels:
                    self._labels.require(prompt, self._examples.where(index))
                with told_where(self._examples.where, prompt):
                    if most_of_prompt is not None and tokens > most_of_prompt:
                        self.long_prompts += 1
                    elif self._labels and (whole := length_of_example(prompt)) > self._labels.most:
                        self._leave_out(whole, self._labels)
                    else:
                        if (character := strange.get(index - start)) is not None:
                            self._strange.append((index, character))
                        if self._seen is not None:
                            self._seen(prompt)
                        yield index, tokens

    def _measured(self) -> Iterator[tuple[int, list[Prompt], list[int]]]:
        """Yields part after part of the prompts: index of the first, the prompts, their lengths.

        While the tokenizer works on one part, without the interpreter's lock, the next ones are
        read and rendered.
        """
        lengths = PromptLengths(self._tokenizer, self._examples.where, self._dataset.max_length, every=self._measure)
        under_way: deque[tuple[int, list[Prompt], Future[list[int]]]] = deque()
        with ThreadPoolExecutor(AHEAD, "lengths of prompts") as threads:
            for start in range(0, self.count, AT_ONCE):
                if len(under_way) > AHEAD:
                    yield _waited(under_way.popleft())
                prompts = [self._examples[index] for index in range(start, min(start + AT_ONCE, self.count))]
                under_way.append((start, prompts, threads.submit(lengths.of, prompts)))
            yield from map(_waited, under_way)

    def _leave_out(self, tokens: int, labels: Labels) -> None:
        """Counts an example that is too long, where `max_length` says that such are left out."""
        if self._dataset.max_length is None:
            remedy = f"{self._key}.max_length={labels.most} leaves such examples out"
            raise UserError(f"the example has {tokens} tokens: {labels.why} ({remedy})")
        self.long_examples += 1

    def _refuse(self) -> None:
        if self.long_examples and self._labels:
            raise UserError(f"{self._key}: no example fits with its answer: {self._labels.why}")
        raise UserError(f"{self._key}.max_length: every prompt is longer than {self._dataset.max_length} tokens")

    def _unknown_characters(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """Returns the first character without a token of each prompt that has one, by position."""
        if self._tokenizer is None or self._labels:  # with labels it was said before
            return {}
        owners = [(i, text_of(message)) for i, prompt in enumerate(prompts) for message in prompt.messages]
        unknown = self._tokenizer.all_unknown([text for _, text in owners])
        found: dict[int, str] = {}
        for (i, _), character in zip(owners, unknown, strict=True):
            if character:
                found.setdefault(i, character)
        return found


def _waited(part: tuple[int, list[Prompt], Future[list[int]]]) -> tuple[int, list[Prompt], list[int]]:
    start, prompts, lengths = part
    return start, prompts, lengths.result()
