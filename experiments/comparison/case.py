"""Prompts that experiments.compare gives to each engine, and what it asks of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rljax.chat.pictures import EncodedPictures, PictureProcessor, load_processor
from rljax.config.schema import Config, DatasetConfig
from rljax.hf.spec import read_config, takes_pictures
from rljax.hf.tokenizer import Tokenizer, load_tokenizer
from rljax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the prompts that all engines get."""

    config: Config  # greedy, and of one dtype for all engines
    model_dir: Path
    dtype: str
    uids: tuple[str, ...]  # of the prompts
    prompts: tuple[np.ndarray, ...]  # [P] int32 each
    pictures: tuple[EncodedPictures, ...] | None  # of each prompt; None where the model takes text alone
    stop_token_ids: tuple[int, ...]
    mark_ids: tuple[int, ...] = ()  # tokens that stand for a picture: completions are compared up to the first of them

    @property
    def max_new_tokens(self) -> int:
        return self.config.gconfig.max_new_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with a completion."""
        return max(map(len, self.prompts)) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Greedy:
    """A greedy completion, with the log-probs that the engine reported while it decoded."""

    token_ids: np.ndarray  # [T] int32
    logp: np.ndarray  # [T] float64, nats
    cut_at: tuple[int, float] | None = None  # the next token and its log-prob, where it stands for a picture

    def before(self, token_ids: Sequence[int]) -> Greedy:
        """Returns the part before the first of some tokens."""
        found = np.flatnonzero(np.isin(self.token_ids, token_ids))
        if not len(found):
            return self
        at = int(found[0])
        return Greedy(self.token_ids[:at], self.logp[:at], (int(self.token_ids[at]), float(self.logp[at])))

    def token(self, at: int) -> int | None:
        """Returns the token at a position up to the length; None if the completion ended before it."""
        if at < len(self.token_ids):
            return int(self.token_ids[at])
        return None if self.cut_at is None else self.cut_at[0]

    def scored(self, at: int, scores: np.ndarray) -> float:
        """Returns the log-prob of `token(at)`: of scores [T], or as decoded, about the same."""
        if at < len(self.token_ids):
            return float(scores[at])
        return np.nan if self.cut_at is None else self.cut_at[1]


class Subject(Protocol):
    """An engine whose model is compared. It is made with a `Case`, and loads the model then."""

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Greedy]:
        """Completes the prompts, each token the likeliest, as the engine does it in a run."""
        ...

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the log-probs of given tokens: [T] float64, nats; 0 at the first token."""
        ...

    def hidden_states(self, sequence: np.ndarray) -> np.ndarray | None:
        """Returns the embedding, the output of each layer and that of the final norm.

        [L + 2, T, H] float64; None if the engine doesn't show them.
        """
        ...

    def close(self) -> None: ...


def make_case(config: Config, model_dir: Path, *, prompts: int, tokens: int, dtype: str) -> Case:
    """Reads the first prompts of the validation set, or of the training set if there is none.

    Raises UserError.
    """
    from rljax.config import io as config_io
    from rljax.data import open_prompts
    from rljax.workflows import sampling_params

    config = config_io.changed(
        config,
        [
            ("gconfig.greedy", "true"),
            ("gconfig.temperature", "1.0"),
            ("gconfig.min_new_tokens", "0"),
            ("gconfig.max_new_tokens", str(tokens)),
            ("actor.dtype", dtype),
        ],
    )
    tokenizer: Any = load_tokenizer(model_dir, config.rollout)
    processor = load_processor(model_dir) if takes_pictures(model_dir) or "vision_config" in read_config(model_dir) else None
    if processor is not None:
        tokenizer = PictureTokenizer(tokenizer, processor)
    source = open_prompts(_data(config), key="valid_dataset", seed=config.seed, tokenizer=tokenizer)
    chosen = list(itertools.islice(source.epoch(0), prompts))
    pictures = None if processor is None else tuple(map(processor.encode, chosen))
    encoded = tuple(tokenizer.encode_prompt(prompt) for prompt in chosen)
    stops = sampling_params(config.gconfig, tokenizer).stop_token_ids
    marks = () if processor is None else processor.mark_ids
    return Case(config, model_dir, dtype, tuple(prompt.uid for prompt in chosen), encoded, pictures, stops, marks)


class PictureTokenizer:
    """A tokenizer that counts a picture as the tokens that the model makes of it."""

    def __init__(self, tokenizer: Tokenizer, processor: PictureProcessor) -> None:
        self._tokenizer, self._processor = tokenizer, processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        return self._processor.encode(prompt).token_ids


def _data(config: Config) -> DatasetConfig:
    return config.valid_dataset if config.valid_dataset.path else config.train_dataset
