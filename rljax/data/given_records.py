"""Prompts from records that a program gives: mappings with the columns of a format, or prompts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rljax.data.formats import find_format, told_by_columns
from rljax.data.prompts import Examples
from rljax.data.records import InMemory
from rljax.errors import UserError
from rljax.types import Prompt


class Cycle:
    """Prompts of an iterable of records or of lists of records, again and again.

    Example: next(Cycle([{"prompt": "1+1=", "answer": "2"}])).uid == "0/0"
    """

    def __init__(self, records: Iterable[Any]) -> None:
        self._prompts = _cycled(records)

    def __next__(self) -> Prompt:
        return next(self._prompts)

    def first(self) -> Prompt:
        """Returns the next prompt, which stays the next one. Raises UserError if there is none."""
        prompt = next(self._prompts)
        self._prompts = itertools.chain([prompt], self._prompts)
        return prompt


def prompt_of(record: Any, uid: str) -> Prompt:
    """Returns the prompt of a record. Raises UserError if it is none."""
    if isinstance(record, Prompt):
        return dataclasses.replace(record, uid=uid)
    if not isinstance(record, Mapping):
        raise UserError(f"record {uid}: a mapping of columns, or a Prompt, is needed, not {type(record).__name__}")
    where = f"record {uid}"
    form = find_format(told_by_columns(record, where), "record")
    return dataclasses.replace(Examples(InMemory(where, [dict(record)]), form)[0], uid=uid)


def _cycled(records: Iterable[Any]) -> Iterator[Prompt]:
    for epoch in itertools.count():
        index = 0
        for several in records:
            for record in several if isinstance(several, list | tuple) else (several,):
                yield prompt_of(record, f"{epoch}/{index}")
                index += 1
        if not index:
            raise UserError(f"prepare_batch: the dataloader has no {'more ' if epoch else ''}records (it must begin again)")
