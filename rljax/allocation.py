"""`allocation_mode`: which engine runs where, e.g. `sglang:d4t1+fsdp:d4`, `jax:d2t2+jax:f4`, `jax:d1`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Pool:
    """Devices of one engine.

    Example: Pool(engine="jax", data=2, tensor=2, first_device=0) is `jax:d2t2` on devices 0 to 3
    """

    engine: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    fsdp: int = 1
    first_device: int = 0

    @property
    def size(self) -> int:
        """Devices in the pool."""
        return self.data * self.tensor * self.pipeline * self.context * self.fsdp


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Either pool may be None: no learner is serving, no sampler is replay. One pool named alone is both."""

    sampler: Pool | None
    learner: Pool | None
