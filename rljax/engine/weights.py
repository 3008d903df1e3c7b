"""Weights on their way from a learner to a sampler: requests for an export, and its results.

    request             result                                         taken by
    ExportToDirectory   WeightsInDirectory: HF safetensors             any sampler
    ExportToSampler     WeightsInMemory: arrays of this process        a sampler of the same engine
                        WeightsBroadcast: the learner sends them       a sampler that is servers
                        WeightsAtLeader: nothing, rank 0 has them      nobody

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
    """Request for HF safetensors, config and tokenizer in a directory, which is created if missing."""

    directory: Path

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON that `target_from_json` decodes.

        The path is absolute, since other processes may have another working directory.
        """
        return {"directory": str(self.directory.absolute())}


@dataclasses.dataclass(frozen=True)
class ExportToSampler:
    """Request for weights by the run's transport, chosen by `rljax.engine.transport_of`.

    Example: ExportToSampler("nccl", Pool("sglang", data=2, tensor=2))
    """

    transport: str  # one of the learner's `Plugin.transports`, never "directory"
    pool: Pool  # the sampler's

    def to_json(self) -> dict[str, Any]:
        return {"transport": self.transport, "pool": dataclasses.asdict(self.pool)}


ExportTarget = ExportToDirectory | ExportToSampler


def target_from_json(fields: Mapping[str, Any]) -> ExportTarget:
    """Decodes what `to_json` of a target returned. Raises KeyError or TypeError for anything else."""
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
    """Arrays of this process, in the sharding of the engine that both sides belong to.

    Later updates leave them alone.
    """

    params: Any  # a pytree of the engine's framework; the sampler reshards it


class Post(Protocol):
    """Sends a POST to one server of a sampler: (path, body) -> answer.

    Raises UserError if the server refuses or is lost.
    """

    @property
    def member(self) -> object:
        """Identity of the process at the other end, if known; another one after it was lost."""
        ...

    def __call__(self, path: str, body: dict[str, Any]) -> Awaitable[Any]: ...


class Sender(Protocol):
    """Sends a learner's weights to servers by a collective or by handles of shared memory."""

    async def send(self, posts: Sequence[Post], version: int, *, flush: bool) -> None:
        """Sends all weights to all servers, which are paused.

        Args:
          version: number that the servers report from now on.
          flush: whether the servers drop their caches.

        Raises:
          SamplerError: a server did not take them.
        """
        ...


@dataclasses.dataclass(frozen=True)
class WeightsBroadcast:
    """Weights that the learner sends to the sampler's servers itself.

    They are gathered only while they are sent.
    """

    sender: Sender


@dataclasses.dataclass(frozen=True)
class WeightsAtLeader:
    """Result of an export on ranks 1 and up, if rank 0 alone hands the weights over.

    Those ranks have done their part by then.
    """


WeightSource = WeightsInDirectory | WeightsInMemory | WeightsBroadcast | WeightsAtLeader
