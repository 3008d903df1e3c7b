"""Flags of the benchmarks of the JAX sampler, the config that they make, and what they measure in."""

from __future__ import annotations

from typing import Any

from absl import flags

from rljax.config.io import from_dict
from rljax.config.schema import Config
from rljax.configs import base
from rljax.experiments.bench.shapes import SHAPES

SHAPE = flags.DEFINE_enum("shape", "qwen3-0.6b", list(SHAPES), "Shape of the model.")
DIRECTORY = flags.DEFINE_string("directory", "", "Directory of the model, written if missing; empty: a temporary one.")
SLOTS = flags.DEFINE_integer("slots", 256, "jax.slots")
CONTEXT = flags.DEFINE_integer("context", 2048, "jax.context_length")
PAGE = flags.DEFINE_integer("page_size", 64, "jax.page_size")
TOKENS = flags.DEFINE_integer("cache_tokens", None, "jax.cache_tokens")
PREFILL = flags.DEFINE_integer("prefill_chunk", 2048, "jax.prefill_chunk")
STEPS = flags.DEFINE_integer("decode_steps", 4, "jax.decode_steps")
ATTENTION = flags.DEFINE_string("decode_attention", "auto", "jax.decode_attention")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Dtype of weights, computation and cache.")


def make_config(**keys: Any) -> Config:
    """Returns the defaults with the flags, and with other keys.

    A key without a section is one of jax.
    """
    config = base.get_config()
    config.actor.dtype = DTYPE.value
    settings = {
        "sampler_dtype": DTYPE.value,
        "cache_dtype": DTYPE.value,
        "slots": SLOTS.value,
        "context_length": CONTEXT.value,
        "page_size": PAGE.value,
        "cache_tokens": TOKENS.value,
        "prefill_chunk": PREFILL.value,
        "decode_steps": STEPS.value,
        "decode_attention": ATTENTION.value,
    }
    named = {key if "." in key else f"jax.{key}": value for key, value in (settings | keys).items()}
    config.update_from_flattened_dict(named)
    return from_dict(config)


def peak_gb() -> float | None:
    """Returns the peak memory of this process's first device in GB; None if it does not say."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else round(peak / 1e9, 2)
