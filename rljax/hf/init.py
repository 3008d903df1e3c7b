"""Random models in HF naming, so that every backend starts from the same bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rljax.config.schema import ModelConfig
from rljax.hf.spec import CONFIG, DEFAULTS, MODEL_TYPES, ModelSpec
from rljax.hf.tensors import tensors
from rljax.hf.weights import write_json, write_weights

GENERATION_CONFIG = "generation_config.json"


def init_directory(
    model: ModelConfig,
    directory: Path | str,
    *,
    seed: int,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    bos_token_id: int | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> ModelSpec:
    """Writes config.json, generation_config.json and model.safetensors of a random model.

    The tokenizer is written elsewhere. Matrices are normal with std `initializer_range`, those that
    write to the residual stream with that / sqrt(2 layers) (Radford et al. 2019, section 2.3),
    norms are the identity, biases 0. A tensor depends on seed and its name only.

    Raises:
      UserError: the disk is full.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    ids = list(eos_token_ids)
    special = {"eos_token_id": ids[0] if len(ids) == 1 else ids, "bos_token_id": bos_token_id, "pad_token_id": pad_token_id}
    spec = spec_of(model, vocab_size)
    write_json(directory / CONFIG, spec.to_config() | special | {"dtype": dtype, "initializer_range": model.initializer_range})
    write_json(directory / GENERATION_CONFIG, {"do_sample": True, **special})
    shapes = tensors(spec)
    write_weights(directory, shapes, lambda name: _random(spec, name, shapes[name], seed, model.initializer_range), dtype)
    return spec


def spec_of(model: ModelConfig, vocab_size: int) -> ModelSpec:
    """Returns the architecture that `actor.init` describes.

    Settings that it leaves open are as in the published models.
    """
    config = {
        "model_type": {name: model_type for model_type, name in MODEL_TYPES.items()}[model.architecture],
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if model.architecture == "gemma3":
        window = min(DEFAULTS["gemma3"]["sliding_window"], max(model.max_position_embeddings // 4, 1))
        config |= {"query_pre_attn_scalar": model.head_dim, "sliding_window": window}
    return ModelSpec.from_config(config, "actor.init")


def _random(spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int, std: float) -> np.ndarray:
    if name.endswith("norm.weight"):
        return np.full(shape, 0.0 if spec.gemma_norms else 1.0, np.float32)
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = std / (2 * spec.num_layers) ** 0.5 if residual else std
    return (generator.standard_normal(shape, np.float32) * np.float32(std)).astype(np.float32)
