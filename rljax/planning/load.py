"""Tokens of an average episode and of a step, which a config alone does not say."""

from __future__ import annotations

import dataclasses

import numpy as np

from rljax.config.schema import Config
from rljax.hf.flops import update_flops
from rljax.hf.spec import ModelSpec

PROMPT = 256  # tokens, where nothing limits a prompt
SHARE = 0.5  # of gconfig.max_new_tokens that an average completion has


@dataclasses.dataclass(frozen=True)
class Load:
    """Lengths of an average episode.

    Example: Load.of(config).trained == 0.8 with prompts of 128 tokens and completions of 512
    """

    prompt: int  # tokens
    completion: int  # tokens, of which every one is trained on

    @classmethod
    def of(cls, config: Config, prompt: int | None = None, completion: int | None = None, context: int | None = None) -> Load:
        """Assumes what is not given: train_dataset.max_length or PROMPT tokens of a prompt, and
        SHARE of the longest completion, as far as rows and context have room for them.

        Args:
          context: most tokens that the sampler has room for; None: it sets no limit of its own.
        """
        row, longest = config.actor.mb_spec.max_tokens_per_row, config.gconfig.max_new_tokens
        most = row if context is None else min(row, context)
        prompt = prompt or min(config.train_dataset.max_length or PROMPT, max(most - longest, 1))
        return cls(prompt, completion or max(min(round(SHARE * longest), most - prompt), 1))

    @property
    def tokens(self) -> int:
        """Tokens of an episode."""
        return self.prompt + self.completion

    @property
    def trained(self) -> float:
        """Share of the tokens that are trained on."""
        return self.completion / self.tokens

    def episodes(self, config: Config) -> int:
        """Episodes of a step."""
        return config.batch_size * config.gconfig.n_samples

    def several(self, config: Config, rows: int) -> bool:
        """Returns whether a minibatch takes more than one micro-batch.

        Args:
          rows: of a micro-batch, on all devices together.
        """
        length = config.actor.mb_spec.max_tokens_per_row
        needed = self.episodes(config) / config.actor.ppo_n_minibatches / max(length // self.tokens, 1)
        return needed > rows

    def update_flops(self, config: Config, spec: ModelSpec) -> float:
        """Returns the model's FLOPs of the updates of a step, recomputation not counted."""
        adapters = config.actor.lora.rank > 0
        segments = np.ones((1, self.tokens), np.int32)
        return self.episodes(config) * update_flops(spec, segments, self.completion, adapters=adapters)
