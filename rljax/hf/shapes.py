"""Published models by name: their shapes alone, for plans and benchmarks that need no weights."""

from __future__ import annotations

from rljax.config.schema import ModelConfig
from rljax.hf.init import spec_of
from rljax.hf.spec import ModelSpec

POSITIONS = 40960


def _shape(
    architecture: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, *, tied: bool
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
    )


SHAPES: dict[str, tuple[int, ModelConfig]] = {  # vocabulary, and the rest as `actor.init` has it
    "qwen3-0.6b": (151936, _shape("qwen3", 1024, 3072, 28, 16, 8, 128, tied=True)),
    "qwen3-1.7b": (151936, _shape("qwen3", 2048, 6144, 28, 16, 8, 128, tied=True)),
    "qwen3-4b": (151936, _shape("qwen3", 2560, 9728, 36, 32, 8, 128, tied=True)),
    "qwen3-8b": (151936, _shape("qwen3", 4096, 12288, 36, 32, 8, 128, tied=False)),
    "qwen3-14b": (151936, _shape("qwen3", 5120, 17408, 40, 40, 8, 128, tied=False)),
    "qwen3-32b": (151936, _shape("qwen3", 5120, 25600, 64, 64, 8, 128, tied=False)),
    "qwen2.5-0.5b": (151936, _shape("qwen2", 896, 4864, 24, 14, 2, 64, tied=True)),
    "qwen2.5-1.5b": (151936, _shape("qwen2", 1536, 8960, 28, 12, 2, 128, tied=True)),
    "qwen2.5-7b": (152064, _shape("qwen2", 3584, 18944, 28, 28, 4, 128, tied=False)),
    "llama3.2-1b": (128256, _shape("llama", 2048, 8192, 16, 32, 8, 64, tied=True)),
    "llama3.1-8b": (128256, _shape("llama", 4096, 14336, 32, 32, 8, 128, tied=False)),
    "llama3.1-70b": (128256, _shape("llama", 8192, 28672, 80, 64, 8, 128, tied=False)),
    "smollm2-135m": (49152, _shape("llama", 576, 1536, 30, 9, 3, 64, tied=True)),
    "tiny": (512, _shape("qwen3", 64, 128, 2, 4, 2, 16, tied=True)),
}


def shape_of(name: str) -> ModelSpec:
    """Returns the spec of a model in SHAPES."""
    vocabulary, model = SHAPES[name]
    return spec_of(model, vocabulary)
