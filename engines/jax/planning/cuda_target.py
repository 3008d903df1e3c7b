"""NVIDIA GPUs to compile for that are not there, as XLA's compiler for CUDA is told of them.

The plugin's compiler takes a target config, a text of the proto `GpuTargetConfigProto`, in the
place of a GPU, and needs neither a driver nor a card. What only a card can tell it does without:
products and fusions are those of its heuristics, not of an autotuner's trials, and cuDNN's
workspace counts as nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Sequence

import jax

from rljax.chips import Chip, Topology
from rljax.errors import UserError

PLUGIN = "xla_cuda"  # beginning of its entry point's name
HOST = 8  # GPUs of one at most


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Limits of a compute capability (CUDA programming guide, "Compute Capabilities")."""

    capability: tuple[int, int]
    lanes: int  # float32 units of a multiprocessor
    threads: int  # of a multiprocessor
    shared: int  # bytes of a multiprocessor; a block may use all but 1 KiB


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Size of a card's processor, according to its data sheet."""

    architecture: Architecture
    multiprocessors: int
    l2: int  # bytes
    gigahertz: float  # boost


KIB, MIB = 1 << 10, 1 << 20
AMPERE = Architecture((8, 0), 64, 2048, 164 * KIB)
ADA = Architecture((8, 9), 128, 1536, 100 * KIB)
HOPPER = Architecture((9, 0), 128, 2048, 228 * KIB)
BLACKWELL = Architecture((10, 0), 128, 2048, 228 * KIB)
GPUS = {  # by the chip's name in `--topology`
    "a100": Gpu(AMPERE, 108, 40 * MIB, 1.41),
    "a100-40gb": Gpu(AMPERE, 108, 40 * MIB, 1.41),
    "l4": Gpu(ADA, 58, 48 * MIB, 2.04),
    "h100": Gpu(HOPPER, 132, 50 * MIB, 1.98),
    "h100-pcie": Gpu(HOPPER, 114, 50 * MIB, 1.755),
    "h200": Gpu(HOPPER, 132, 50 * MIB, 1.98),
    "b200": Gpu(BLACKWELL, 148, 126 * MIB, 1.965),
}


def cuda_devices(topology: Topology) -> Sequence[jax.Device]:
    """Devices of a GPU topology, to compile for, eight to a host.

    Raises UserError without jax's CUDA plugin, or for a GPU that is not in GPUS.
    """
    chip = topology.chip
    if chip.name not in GPUS:
        raise UserError(f"--topology: {topology.name} can't be compiled for (GPUs: {', '.join(GPUS)})")
    if not any(point.name.startswith(PLUGIN) for point in importlib.metadata.entry_points(group="jax_plugins")):
        raise UserError(f"--topology: {topology.name} needs the CUDA plugin of jax, not a GPU (pip install 'rljax[cuda]')")
    from jax.experimental import topologies

    hosts = -(-topology.devices // HOST)
    if topology.devices % hosts:
        raise UserError(f"--topology: {topology.devices} GPUs are not equally many on {hosts} hosts of up to {HOST}")
    shape = f"1x{hosts}x{topology.devices // hosts}"
    return topologies.get_topology_desc(platform="cuda", target_config=target_config(chip), topology=shape).devices


def target_config(chip: Chip) -> str:
    """Returns the text that describes a GPU of GPUS to XLA."""
    gpu = GPUS[chip.name]
    limits, (major, minor) = gpu.architecture, gpu.architecture.capability
    name = f"NVIDIA {chip.kind}"
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  name: "{name}"
  core_count: {gpu.multiprocessors}
  clock_rate_ghz: {gpu.gigahertz}
  device_memory_size: {chip.memory}
  memory_bandwidth: {round(chip.bandwidth or 0)}
  l2_cache_size: {gpu.l2}
  fpus_per_core: {limits.lanes}
  threads_per_core_limit: {limits.threads}
  shared_memory_per_core: {limits.shared}
  shared_memory_per_block_optin: {limits.shared - KIB}
  shared_memory_per_block: {48 * KIB}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""
