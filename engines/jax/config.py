"""The section `jax` of the config."""

from __future__ import annotations

import dataclasses

from rljax.config.keys import HALF_OPEN_UNIT, NOT_NEGATIVE, POSITIVE, key
from rljax.config.schema import EngineConfig
from rljax.errors import UserError

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class JaxConfig(EngineConfig):
    """The JAX sampler and learner."""

    slots: int = key(64, "Requests decoded at once.", POSITIVE)
    context_length: int = key(2048, "Longest prompt and completion together.", POSITIVE, unit="tokens")
    page_size: int = key(
        64, "Room of a page of the sampler's cache. Equal prefixes are shared by whole pages.", POSITIVE, unit="tokens"
    )
    cache_tokens: int | None = key(
        None,
        "Room of the sampler's cache, all pages together. With less than slots * context_length requests wait for pages, and "
        "the youngest that run give theirs up. None: slots * context_length, or what cache_memory_fraction allows.",
        POSITIVE,
        unit="tokens",
    )
    cache_memory_fraction: float = key(
        0.9, "Most of the memory left beside the sampler's weights that its cache takes by itself.", HALF_OPEN_UNIT
    )
    prefill_chunk: int = key(256, "Prompt tokens per dispatch.", POSITIVE, unit="tokens")
    decode_steps: int = key(4, "Decode steps per dispatch.", POSITIVE)
    decode_attention: str = key(
        "auto",
        "Kernel of the sampler's attention over its cache. auto: the first of these that can do it on the devices at hand.",
        choices=("auto", "pallas_gpu", "pallas_tpu", "xla"),
    )
    cache_dtype: str = key("bfloat16", "What the sampler's keys and values are kept in.", choices=_DTYPES)
    sampler_dtype: str = key("bfloat16", "What the sampler's weights are kept and computed in.", choices=_DTYPES)
    attention: str = key(
        "auto",
        "Kernel of the learner's attention. auto: the first of these that can do it on the devices at hand.",
        choices=("auto", "cudnn", "splash", "tokamax", "xla"),
    )
    unroll: bool | None = key(
        None,
        "The learner's layers one after the other, not in a loop: faster steps, and a compile time that grows with depth. "
        "None: where gradient_checkpointing is none, on a GPU, or on a CPU for a model of up to 8 layers.",
    )
    profile: str = key("", "Directory for a trace of the learner's third to fifth update. Empty: none.")
    precise: bool = key(
        False, "Sum float32 in blocks: logits within 1e-4 of transformers on the CPU (docs/parity.md); costs time."
    )
    bitwise: bool = key(
        False,
        "The sampler scores its tokens by the learner's own program: importance weights before a first step are 1 exactly.",
    )
    release_memory: bool = key(
        False, "A sampler on the learner's devices lets go of weights and cache while it updates (synchronous runs only)."
    )
    compilation_cache: str = key("", "Directory of compiled programs. Empty: that of JAX_COMPILATION_CACHE_DIR, if any.")
    processes: int | None = key(
        None,
        "Processes of the learner. None: as many as torchrun started, else one; N: so many, started on this host unless "
        "torchrun did; 0: those that jax.distributed finds (a TPU pod, Slurm, Open MPI, Kubernetes). See docs/processes.md.",
        NOT_NEGATIVE,
    )

    def check_slots(self, shards: int) -> None:
        """Checks that each of the sampler's data shards gets as many slots. Raises UserError."""
        if self.slots % shards:
            raise UserError(f"jax.slots: {self.slots} is not a multiple of the {shards} data shards of its pool")
