"""Validation sets of a config, opened: the prompts that evaluations ask."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from rljax.chat.messages import Tool
from rljax.config.schema import Config, DatasetConfig
from rljax.config.validation import key_of, validation_sets
from rljax.data.prompts import open_prompts
from rljax.hf.tokenizer import Tokenizer
from rljax.types import Prompt


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """One validation set."""

    name: str  # empty for valid_dataset
    dataset: DatasetConfig
    prompts: Sequence[Prompt]  # at most evaluator.max_prompts
    identity: Mapping[str, object]  # of the data, as PromptSource.identity
    where: Callable[[str], str]  # returns the origin of a prompt by its uid: "test.jsonl:17"

    @property
    def title(self) -> str:
        """Name by which binaries call the set: valid_dataset, or its name in valid_datasets."""
        return self.name or "valid_dataset"


def open_held_out(config: Config, tokenizer: Tokenizer | None, added_tools: Sequence[Tool] = ()) -> list[HeldOut]:
    """Opens `valid_dataset` and the sets of `valid_datasets`.

    Args:
      tokenizer: None to leave lengths unchecked.
      added_tools: as of `open_prompts`.

    Raises UserError, one line with the set, file and remedy.
    """
    found = []
    for name, dataset in validation_sets(config).items():
        if tokenizer is None:
            dataset = dataclasses.replace(dataset, max_length=None)
        source = open_prompts(dataset, key=key_of(name), seed=config.seed, tokenizer=tokenizer, added_tools=added_tools)
        prompts = list(itertools.islice(source.epoch(0), config.evaluator.max_prompts))
        found.append(HeldOut(name, dataset, prompts, source.identity, source.where))
    return found
