"""Published figures of TPUs, for programs that are compiled without one.

Of each device as JAX counts them: a TPU7x chip is two devices, all others are one. From the pages
v5e, v5p, v6e and tpu7x of https://cloud.google.com/tpu/docs, as excerpts of them quoted on
2026-11-28; the bandwidth of TPU7x was in none of these.
"""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device's memory and its speed."""

    memory: int  # bytes
    bandwidth: float  # bytes per second, of that memory
    flops: float  # per second, dense bfloat16


CHIPS = {  # by `jax.Device.device_kind`
    "TPU v5 lite": Chip(16 * GIB, 819e9, 197e12),
    "TPU v5": Chip(95 * GIB, 2765e9, 459e12),
    "TPU v6 lite": Chip(32 * GIB, 1638e9, 918e12),
    "TPU7x": Chip(96 * GIB, 3690e9, 1153.5e12),
}


def chip_of(kind: str) -> Chip | None:
    """Returns the figures of a `device_kind`; None if it is not in the table."""
    return CHIPS.get(kind)
