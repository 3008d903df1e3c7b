"""Hosts of a topology: how many there are, and the slices in which GKE has TPUs.

The slices and their names are those of GKE's pages on TPUs, such as
https://cloud.google.com/tpu/docs/v5e, as excerpts of them quoted on 2026-11-29.
"""

from __future__ import annotations

import dataclasses
import math
import re

from rljax.chips import TPU, Chip, Topology
from rljax.config.allocation import Allocation
from rljax.errors import UserError

GPUS = 8  # of a host, unless the user says otherwise
CPU = "cpu"


@dataclasses.dataclass(frozen=True)
class Slices:
    """Slices of one kind of TPU on GKE."""

    label: str  # value of the node label cloud.google.com/gke-tpu-accelerator
    axes: int  # of a topology
    alone: tuple[str, ...]  # topologies that are one host
    chips: int = 4  # of a host of every other topology


SLICES = {  # by `Chip.name`
    "v4": Slices("tpu-v4-podslice", 3, ("2x2x1",)),
    "v5e": Slices("tpu-v5-lite-podslice", 2, ("1x1", "2x2", "2x4")),
    "v5p": Slices("tpu-v5p-slice", 3, ("2x2x1",)),
    "v6e": Slices("tpu-v6e-slice", 2, ("1x1", "2x2", "2x4")),
    "tpu7x": Slices("tpu7x", 3, ("2x2x1",)),
}


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Hosts of one kind that a side of a run takes.

    Example: Hosts.of(Topology.parse("v5e:4x4"), None) has count 4, devices 4 and slice "4x4"
    """

    topology: Topology
    count: int
    devices: int  # of a host, as JAX and torch count them
    slice: str = ""  # TPU topology, such as "4x4"; "" for other devices

    @classmethod
    def of(cls, topology: Topology, devices: int | None) -> Hosts:
        """Divides the devices of a topology among hosts.

        Args:
          devices: of a host; None: as the topology's slice has them, 8 GPUs, or all on one host.

        Raises UserError for a topology that is no number of whole hosts.
        """
        shape = topology.name.partition(":")[2]
        if topology.chip.platform == TPU:
            most = _slice_devices(topology, shape)
            if devices not in (None, most):
                raise UserError(f"--devices_per_host: a host of {topology.name} has {most} devices, not {devices}")
            return cls(topology, topology.devices // most, most, shape)
        most = min(devices or (topology.devices if topology.chip.name == CPU else GPUS), topology.devices)
        if topology.devices % most:
            raise UserError(
                f"--topology: {topology.name} is {topology.devices} devices, which is no number of whole hosts of {most}"
                " (--devices_per_host)"
            )
        return cls(topology, topology.devices // most, most)

    @property
    def accelerator(self) -> str:
        """Node label of the TPU on GKE."""
        return SLICES[self.topology.chip.name].label

    @property
    def chips(self) -> int:
        """Chips of a host, of which a TPU7x has two devices each."""
        return self.devices // self.topology.chip.devices


def parse(name: str) -> Topology:
    """Reads CHIP:COUNT, CHIP:AxB, or cpu:COUNT for a trial without accelerators. Raises UserError."""
    match = re.fullmatch(rf"{CPU}:([1-9]\d*)", name)
    return Topology.attached((), int(match[1])) if match else Topology.parse(name)


def check_slice(topology: Topology) -> None:
    """Raises UserError for TPUs that are no slice, such as v5e:3x3."""
    if topology.chip.platform == TPU:
        Hosts.of(topology, None)


def host_of(topology: Topology) -> int | None:
    """Returns the devices of a host; None where they are no number of whole hosts."""
    try:
        return Hosts.of(topology, None).devices
    except UserError:
        return None


def check_shared(pools: Allocation, hosts: Hosts) -> None:
    """Checks that a sampler and a learner on the same devices are not to run on several hosts.

    Raises UserError.
    """
    sampler, learner = pools.sampler, pools.learner
    if sampler is not None and learner is not None and sampler.first_device == learner.first_device:
        raise UserError(
            f"allocation_mode: {pools} shares its devices, which only the pools of one host can do, and a host of"
            f" {hosts.topology.name} has {hosts.devices} (use + between the pools)"
        )


def shared_over_hosts(pools: Allocation, topology: Topology) -> str:
    """Says that pools share devices of several hosts, as `check_shared` does; "" if they don't.

    A topology that is no number of whole hosts has no say in it.
    """
    try:
        hosts = Hosts.of(topology, None)
    except UserError:
        return ""
    try:
        if pools.devices > hosts.devices:
            check_shared(pools, hosts)
    except UserError as error:
        return str(error)
    return ""


def largest_host(hosts: Hosts) -> int:
    """Returns the devices of the largest host with the same chip: of GKE's slices, or as these."""
    chip = hosts.topology.chip
    return max((_devices(chip, shape) for shape in SLICES[chip.name].alone), default=0) if hosts.slice else hosts.devices


def single_host(like: Topology, devices: int) -> Hosts:
    """Returns one host of the same chip: of GKE's slices the smallest with so many devices.

    Args:
      devices: at most those of `largest_host`.
    """
    chip = like.chip
    if chip.platform != TPU:
        return Hosts(dataclasses.replace(like, name=f"{chip.name}:{devices}", devices=devices), 1, devices)
    shape = next(shape for shape in SLICES[chip.name].alone if _devices(chip, shape) >= devices)
    size = _devices(chip, shape)
    return Hosts(Topology(f"{chip.name}:{shape}", chip, size), 1, size, shape)


def _devices(chip: Chip, shape: str) -> int:
    """Returns the devices of a slice."""
    return math.prod(map(int, shape.split("x"))) * chip.devices


def _slice_devices(topology: Topology, shape: str) -> int:
    """Returns the devices of a host of a TPU slice."""
    slices, chip = SLICES[topology.chip.name], topology.chip
    lengths = [int(length) for length in shape.split("x")]
    chips = math.prod(lengths)
    if len(lengths) != slices.axes or (shape not in slices.alone and chips % slices.chips):
        example = "4x4" if slices.axes == 2 else "2x2x4"
        raise UserError(f"--topology: {topology.name} is no slice of {chip.name} (as in {chip.name}:{example})")
    return (chips if shape in slices.alone else slices.chips) * chip.devices
