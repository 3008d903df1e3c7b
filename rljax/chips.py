"""Published figures of accelerators, one table for all: memory, speed, and the names they go by.

TPUs: the pages v4, v5e, v5p, v6e and tpu7x of https://cloud.google.com/tpu/docs; JAX has a table of
its own (`jax.experimental.pallas.tpu.get_tpu_info_for_chip`), which a test compares. GPUs: NVIDIA's
data sheets of the product, whose tensor-core rates with sparsity are halved; memory as its driver
reports it, a little less than the name says.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

from rljax.errors import UserError

GIB = 2**30
TPU, GPU, CPU = "tpu", "gpu", "cpu"  # values of `Chip.platform`


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device as JAX and torch count them: a TPU7x chip is two, all others are one.

    Example: find("h100").memory == 79 * GIB
    """

    name: str  # in `--topology`
    kind: str  # a part of the name that JAX and torch report
    platform: str
    flops: float  # per second, dense bfloat16
    memory: int | None = None  # bytes; None: not in the table
    bandwidth: float | None = None  # bytes per second, of that memory
    devices: int = 1  # of a chip


CHIPS = (  # in an order in which the first whose kind is in a device's name is meant
    Chip("h100-pcie", "H100 PCIe", GPU, 756e12, 79 * GIB, 2.0e12),
    Chip("h100-nvl", "H100 NVL", GPU, 835e12, 93 * GIB, 3.9e12),
    Chip("h100", "H100", GPU, 989e12, 79 * GIB, 3.35e12),
    Chip("gh200", "GH200", GPU, 989e12),  # of two sizes
    Chip("h200", "H200", GPU, 989e12, 139 * GIB, 4.8e12),
    Chip("b200", "B200", GPU, 2250e12, 178 * GIB, 8.0e12),  # of HGX B200, at 1,000 W: 4,500 sparse; of GB200 it is 5,000
    Chip("a100-40gb", "A100-SXM4-40GB", GPU, 312e12, 39 * GIB, 1.555e12),
    Chip("a100", "A100", GPU, 312e12, 79 * GIB, 2.039e12),
    Chip("l40s", "L40S", GPU, 362e12, 44 * GIB, 864e9),
    Chip("l4", "L4", GPU, 121e12, 22 * GIB, 300e9),  # 242 sparse, of 58 multiprocessors; 125 is of the die's 60
    Chip("v4", "TPU v4", TPU, 275e12, 32 * GIB, 1228e9),
    Chip("v5e", "TPU v5 lite", TPU, 197e12, 16 * GIB, 819e9),
    Chip("v5p", "TPU v5", TPU, 459e12, 95 * GIB, 2765e9),  # JAX: 2,460e9
    Chip("v6e", "TPU v6 lite", TPU, 918e12, 32 * GIB, 1638e9),
    Chip("tpu7x", "TPU7x", TPU, 1153.5e12, 96 * GIB, 3690e9, devices=2),  # half a chip's 2,307e12, 192 GiB, 7,380e9
)


def chip_of(kind: str) -> Chip | None:
    """Returns the chip of a device name, as JAX and torch report it; None for an unknown one."""
    return next((chip for chip in CHIPS if chip.kind in kind), None)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind that a run is planned for.

    Example: Topology.parse("v5e:2x4").devices == Topology.parse("h100:8").devices == 8
    """

    name: str
    chip: Chip
    devices: int

    @classmethod
    def parse(cls, name: str) -> Topology:
        """Reads CHIP:COUNT or CHIP:AxB, AxBxC. Raises UserError."""
        match = re.fullmatch(r"([a-z0-9-]+):([1-9]\d*(?:x[1-9]\d*)*)", name)
        able = {chip.name: chip for chip in CHIPS if chip.memory is not None and chip.bandwidth is not None}
        if match is None or match[1] not in able:
            if name.partition(":")[0] == CPU:
                raise UserError(
                    "--topology: CPUs have no plan, as none is in the table of memory and speed (h100:1 plans for a GPU)"
                )
            chips = ", ".join(sorted(able))
            raise UserError(f"--topology: {name!r} is none (CHIP:COUNT, as in h100:8 or v5e:2x4; chips: {chips})")
        chip = able[match[1]]
        return cls(name, chip, math.prod(map(int, match[2].split("x"))) * chip.devices)

    @classmethod
    def attached(cls, names: Sequence[str], devices: int) -> Topology:
        """Returns the topology of attached devices, whose size and speed may be unknown.

        Args:
          names: of the devices, as JAX and torch report them; none on a machine without.
          devices: their number in the whole run.
        """
        kind = names[0] if names else CPU
        chip = chip_of(kind) or Chip(kind, kind, CPU if kind == CPU else "other", math.nan)
        return cls(f"{chip.name}:{devices}", chip, devices)

    @property
    def memory(self) -> int:
        """Bytes of a device."""
        assert self.chip.memory is not None  # `parse` takes no other
        return self.chip.memory

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a device's memory."""
        assert self.chip.bandwidth is not None
        return self.chip.bandwidth
