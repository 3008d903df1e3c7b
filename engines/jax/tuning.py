"""Settings that a config leaves to the device: which activations are kept, whether layers are
unrolled, how many rows of logits there are at once, which row lengths are compiled for, and how the
host's memory is used.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util

import jax
from jax.sharding import Mesh

from rljax.backends.jax.mesh import first_device
from rljax.chips import chip_of
from rljax.config.schema import Config
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.row_lengths import padded
from rljax.engines.jax.usable_memory import usable
from rljax.hf.activations import checkpointing, logit_rows, training_bytes
from rljax.hf.spec import ModelSpec
from rljax.process.heap import keep_freed_memory

ANY = 2**30  # layers


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Settings of the learner's programs on a platform."""

    unrolled_layers: int = 0  # layers of the deepest model whose layers are unrolled
    lengths_per_octave: int = 2  # row lengths between a power of two and the next that programs are compiled for


# Unrolled where a loop costs: it copies what the backward pass needs into stacked arrays, which it fills with zeros first.
# On a CPU compilation is slow enough that only shallow models gain by it, and arithmetic so slow that padding costs more
# than a compilation.
TUNINGS = {"cpu": Tuning(unrolled_layers=8, lengths_per_octave=4), "gpu": Tuning(unrolled_layers=ANY)}


def tuning_of(mesh: Mesh) -> Tuning:
    return TUNINGS.get(first_device(mesh).platform, Tuning())


def remat_of(config: Config, spec: ModelSpec, mesh: Mesh) -> str:
    """`actor.gradient_checkpointing`, with "auto" decided by the memory of a device."""
    actor = config.actor
    tokens = actor.mb_spec.rows_per_mb * actor.mb_spec.max_tokens_per_row
    needed = training_bytes(spec, tokens, logit_rows_of(config, spec, mesh), mesh.shape["fsdp"] * mesh.shape["tensor"])
    return checkpointing(actor.gradient_checkpointing, needed, memory_of(first_device(mesh)))


def logit_rows_of(config: Config, spec: ModelSpec, mesh: Mesh) -> int:
    """`actor.logprob_chunk`, with None decided by the memory of a device."""
    return logit_rows(config.actor.logprob_chunk, spec.vocab_size, memory_of(first_device(mesh)))


def unrolled(config: Config, spec: ModelSpec, remat: str, mesh: Mesh) -> bool:
    """`jax.unroll`; None: where all activations are kept, for where they are computed again it
    gains nothing, on a GPU or for a shallow model on a CPU.
    """
    chosen = JaxConfig.of(config).unroll
    return remat == "none" and spec.num_layers <= tuning_of(mesh).unrolled_layers if chosen is None else chosen


def padded_length(length: int, mesh: Mesh) -> int:
    """Least of 32, 48, 64, 96, 128, ... (two to an octave; on a CPU four) that holds a row of so
    many tokens.
    """
    return padded(length, tuning_of(mesh).lengths_per_octave)


def longest_row(config: Config, mesh: Mesh) -> int:
    """Tokens of the longest row that a micro-batch can have, padding included."""
    return padded_length(config.actor.mb_spec.max_tokens_per_row, mesh)


def prepare_host() -> None:
    """Has this process keep the memory that XLA frees, if it is the CPU that computes.

    To be called before JAX looks for devices, for then XLA's threads start.
    """
    if _computes_on_cpu():
        keep_freed_memory()


def _computes_on_cpu() -> bool:
    """Predicts `jax.default_backend() == "cpu"`, as far as it can be told beforehand: an
    accelerator's plugin that will find no device counts as an accelerator.
    """
    chosen: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]  # JAX defines its settings at run time
    if chosen:
        return chosen.split(",")[0] == "cpu"
    return not importlib.metadata.entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None


def memory_of(device: jax.Device) -> int | None:
    """Bytes that JAX may use of the device: as it says, or as a plan has it if it isn't attached."""
    if device not in jax.local_devices():
        chip = chip_of(device.device_kind)
        return None if chip is None or chip.memory is None else int(usable(chip))
    statistics = device.memory_stats()
    return None if statistics is None else statistics.get("bytes_limit")
