"""Settings that a config leaves to the device: which activations are kept, whether layers are
unrolled, and how many rows of logits there are at once.
"""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from rljax.backends.jax.chips import chip_of
from rljax.backends.jax.mesh import first_device
from rljax.config.schema import Config
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.rows import padded_length
from rljax.hf.activations import checkpointing, logit_rows, training_bytes
from rljax.hf.spec import ModelSpec

UNROLLED = ("gpu",)  # platforms where a loop costs: it copies what the backward pass needs into stacked arrays


def remat_of(config: Config, spec: ModelSpec, mesh: Mesh) -> str:
    """`actor.gradient_checkpointing`, with "auto" decided by the memory of a device."""
    actor = config.actor
    tokens = actor.mb_spec.rows_per_mb * actor.mb_spec.max_tokens_per_row
    needed = training_bytes(spec, tokens, logit_rows_of(config, spec, mesh), mesh.shape["fsdp"] * mesh.shape["tensor"])
    return checkpointing(actor.gradient_checkpointing, needed, memory_of(first_device(mesh)))


def logit_rows_of(config: Config, spec: ModelSpec, mesh: Mesh) -> int:
    """`actor.logprob_chunk`, with None decided by the memory of a device."""
    return logit_rows(config.actor.logprob_chunk, spec.vocab_size, memory_of(first_device(mesh)))


def unrolled(config: Config, remat: str, mesh: Mesh) -> bool:
    """`jax.unroll`; None: on a GPU that keeps all activations, for where they are computed again
    it gains nothing.
    """
    chosen = JaxConfig.of(config).unroll
    return remat == "none" and first_device(mesh).platform in UNROLLED if chosen is None else chosen


def longest_row(config: Config) -> int:
    """Tokens of the longest row that a micro-batch can have, padding included."""
    return padded_length(config.actor.mb_spec.max_tokens_per_row)


def memory_of(device: jax.Device) -> int | None:
    """Bytes that JAX may use of the device: as it says, or as published of one that isn't attached."""
    if device not in jax.local_devices():
        chip = chip_of(device.device_kind)
        return None if chip is None else chip.memory
    statistics = device.memory_stats()
    return None if statistics is None else statistics.get("bytes_limit")
