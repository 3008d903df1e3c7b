"""Tiny models and configs for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljax.config.io import from_dict
from rljax.config.schema import Config, ModelConfig
from rljax.configs import base
from rljax.hf import init_directory
from rljax.hf.tokenizer import build_char_tokenizer

VOCABULARY = 100  # of the character-level tokenizer
EOS = 2


def config_of(**overrides: Any) -> Config:
    """Returns the defaults in float32 with a small sampler.

    Keys are given as in `config_of(**{"jax.slots": 2})`.
    """
    config = base.get_config()
    small = {
        "actor.dtype": "float32",
        "jax.sampler_dtype": "float32",
        "jax.cache_dtype": "float32",
        "jax.slots": 4,
        "jax.context_length": 64,
        "jax.page_size": 16,
        "jax.prefill_chunk": 32,
        "jax.decode_steps": 3,
    }
    config.update_from_flattened_dict(small | overrides)
    return from_dict(config)


def make_model(directory: Path, *, seed: int = 0, architecture: str = "qwen3", **changes: Any) -> Path:
    """Writes a HF directory of a random two-layer model with the character-level tokenizer.

    The model has grouped-query attention.
    """
    shape: dict[str, Any] = dict(
        architecture=architecture,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.02,
        tokenizer="char",
    )
    init_directory(ModelConfig(**(shape | changes)), directory, seed=seed, vocab_size=VOCABULARY, eos_token_ids=[EOS])
    build_char_tokenizer(directory)
    return directory
