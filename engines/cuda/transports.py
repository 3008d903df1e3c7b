"""How weights get from a learner to the servers of a pool: which ways there are, and the source for the one that was chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import WeightSource
from rljax.engines.cuda.buckets import BUCKET
from rljax.engines.http.config import SglangConfig
from rljax.engines.http.plugin import TRANSPORTS
from rljax.errors import UserError

if TYPE_CHECKING:
    import torch

    from rljax.engines.cuda.broadcast import BroadcastGroup
    from rljax.engines.cuda.ipc import Gather

KEY = "sglang.transport"


def routes(config: Config, allocation: Allocation) -> tuple[str, ...]:
    """Ways to SGLang servers that the run starts, best first: the one that `sglang.transport` names, or all possible ones.

    Raises UserError for one that is not possible there.
    """
    possible = _possible(config, allocation)
    wanted = SglangConfig.of(config).transport
    if not wanted:
        return possible
    if wanted not in TRANSPORTS:
        raise UserError(f"{KEY}: no transport named {wanted!r} (one of {', '.join(TRANSPORTS)}; empty: the best one)")
    if wanted not in possible:
        raise UserError(f"{KEY}: {wanted} does not lead to {allocation} (possible: {', '.join(possible)})")
    return (wanted,)


def _possible(config: Config, allocation: Allocation) -> tuple[str, ...]:
    sampler, learner = allocation.sampler, allocation.learner
    if sampler is None or learner is None:
        return TRANSPORTS
    handles = ("ipc",) if sampler.size == learner.size else ()  # a rank of the learner for each device of a server
    if SglangConfig.of(config).device == "cpu":
        return ("gloo", *handles, "directory")
    if sampler.first_device == learner.first_device:
        return (*handles, "directory")  # NCCL wants a device a rank
    return ("nccl", "directory")


@dataclasses.dataclass
class Route:
    """The way that was chosen, kept by a torch learner: what its `export(None)` gives. A broadcast's group outlives publishes.

    Example:
        route = Route("nccl", Pool("sglang", data=2))
        return route.source((name, tensor) for name, tensor in model.named_parameters())
    """

    transport: str
    sampler: Pool
    host: str = "127.0.0.1"  # address of this process, as the servers see it
    bucket_bytes: int = BUCKET
    gather: Gather | None = None  # of a learner of several ranks, for ipc; None: of one
    _group: BroadcastGroup | None = None

    def source(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightSource:
        """Of whole tensors under HF names, taken from the iterable as they are sent. Raises UserError for "directory"."""
        if self.transport == "ipc":
            from rljax.engines.cuda.ipc import TorchIpc, alone

            return WeightSource(params=TorchIpc(tensors, self.sampler.tensor, self.gather or alone, self.bucket_bytes))
        if self.transport in ("nccl", "gloo"):
            from rljax.engines.cuda.broadcast import BroadcastGroup, TorchBroadcast

            self._group = self._group or BroadcastGroup(self.transport, self.sampler.tensor, self.host)
            return WeightSource(params=TorchBroadcast(tensors, self._group, self.bucket_bytes))
        raise UserError(f"{KEY}: {self.transport} is no way out of memory (an export there needs a directory)")

    def follow(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What ranks 1 and following of a learner do while rank 0's source is sent: they gather with it. Blocks."""
        if self.transport == "ipc":
            self.source(tensors).params.follow()
        else:
            for _ in tensors:
                pass

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
