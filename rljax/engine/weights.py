"""Weights on their way from a learner to a sampler: what a learner is asked to export, and what it
gives.

    what is asked          what comes                                            who takes it
    ExportToDirectory      WeightsInDirectory: HF safetensors                    any sampler
    ExportToSampler        WeightsInMemory: arrays of this process               a sampler of the same engine
                           WeightsBroadcast: the learner sends them itself       a sampler that is servers
                           WeightsAtLeader: nothing, for rank 0 has them         nobody

A sampler matches the source against the kinds that it takes, and refuses the others by UserError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rljax.config.allocation import Pool


@dataclasses.dataclass(frozen=True)
class ExportToDirectory:
    """Asks for HF safetensors, config and tokenizer under a directory, which is made if it is not
    there.
    """

    directory: Path

    def to_json(self) -> dict[str, Any]:
        """The inverse of `target_from_json`.

        The path is absolute, for other processes may work elsewhere.
        """
        return {"directory": str(self.directory.absolute())}


@dataclasses.dataclass(frozen=True)
class ExportToSampler:
    """Asks for weights in memory, by the transport that `rljax.engine.transport_of` chose for the
    run.

    Example: ExportToSampler("nccl", Pool("sglang", data=2, tensor=2))
    """

    transport: str  # one of the learner's `Plugin.transports`, never "directory"
    pool: Pool  # the sampler's

    def to_json(self) -> dict[str, Any]:
        return {"transport": self.transport, "pool": dataclasses.asdict(self.pool)}


ExportTarget = ExportToDirectory | ExportToSampler


def target_from_json(fields: Mapping[str, Any]) -> ExportTarget:
    """Decodes what `to_json` of a target made. Raises KeyError or TypeError for anything else."""
    if "directory" in fields:
        return ExportToDirectory(Path(fields["directory"]))
    return ExportToSampler(fields["transport"], Pool(**fields["pool"]))


@dataclasses.dataclass(frozen=True)
class WeightsInDirectory:
    """A directory of HF safetensors. The publisher removes it after the publish.

    Example: WeightsInDirectory(Path("/dev/shm/rljax-5c2e/17"))
    """

    directory: Path


@dataclasses.dataclass(frozen=True)
class WeightsInMemory:
    """Arrays of this process, in the layout of the engine that both sides belong to; later updates
    leave them alone.
    """

    params: Any  # a pytree of the engine's framework; the sampler reshards it


class Post(Protocol):
    """POST to one server of a sampler: (path, body) -> answer.

    Raises UserError where it refuses, and when it is lost.
    """

    @property
    def member(self) -> object:
        """The process at the other end, as far as is known: another one after it was lost."""
        ...

    def __call__(self, path: str, body: dict[str, Any]) -> Awaitable[Any]: ...


class Sender(Protocol):
    """Sends a learner's weights to servers by a way of its own: a collective, or handles of shared
    memory.
    """

    async def send(self, posts: Sequence[Post], version: int, *, flush: bool) -> None:
        """Sends all weights to all servers, which are paused. Raises SamplerError when one did not
        take them.

        Args:
          version: number that the servers report from now on.
          flush: whether the servers drop their caches.
        """
        ...


@dataclasses.dataclass(frozen=True)
class WeightsBroadcast:
    """Weights that the learner sends to the sampler's servers itself.

    Only while they are sent are they gathered.
    """

    sender: Sender


@dataclasses.dataclass(frozen=True)
class WeightsAtLeader:
    """What ranks 1 and up of a learner return where rank 0 alone hands weights over; their part in
    it is done by then.
    """


WeightSource = WeightsInDirectory | WeightsInMemory | WeightsBroadcast | WeightsAtLeader
