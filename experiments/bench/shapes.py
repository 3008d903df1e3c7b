"""Models of known shapes with random weights, for benchmarks that no checkpoint is needed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljax.config.schema import ModelConfig
from rljax.hf import ModelSpec, init_directory
from rljax.hf.companion_files import write_companions
from rljax.hf.init import spec_of

SHAPES: dict[str, tuple[int, dict[str, Any]]] = {  # vocabulary, the rest of `actor.init`
    "qwen3-0.6b": (
        151936,
        dict(architecture="qwen3", hidden_size=1024, intermediate_size=3072, num_layers=28)
        | dict(num_heads=16, num_kv_heads=8, head_dim=128),
    ),
    "smollm2-135m": (
        49152,
        dict(architecture="llama", hidden_size=576, intermediate_size=1536, num_layers=30)
        | dict(num_heads=9, num_kv_heads=3, head_dim=64),
    ),
    "tiny": (
        512,
        dict(architecture="qwen3", hidden_size=64, intermediate_size=128, num_layers=2)
        | dict(num_heads=4, num_kv_heads=2, head_dim=16),
    ),
}


def make_model(directory: Path, shape: str) -> ModelSpec:
    """Writes a model of the shape in bfloat16, unless the directory has one."""
    vocabulary, _ = SHAPES[shape]
    if not (directory / "config.json").is_file():
        init_directory(_model(shape), directory, seed=0, vocab_size=vocabulary, eos_token_ids=[2], dtype="bfloat16")
    return ModelSpec.from_directory(directory)


def write_config(directory: Path, shape: str) -> ModelSpec:
    """Writes the config.json of the shape alone, for programs that are compiled and not run."""
    spec = spec_of(_model(shape), SHAPES[shape][0])
    write_companions(directory, spec, "bfloat16", None)
    return spec


def _model(shape: str) -> ModelConfig:
    return ModelConfig(
        **SHAPES[shape][1], max_position_embeddings=40960, tie_word_embeddings=True, initializer_range=0.02, tokenizer="char"
    )
