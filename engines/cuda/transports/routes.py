"""Transports of weights from a learner to servers: the possible ones, and the source for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rljax.config.allocation import Allocation
from rljax.config.schema import Config
from rljax.engine import ExportToSampler, Sender, WeightsBroadcast, WeightSource
from rljax.engines.cuda.transports.buckets import BUCKET
from rljax.engines.http.config import SglangConfig
from rljax.engines.http.plugin import TRANSPORTS
from rljax.errors import UserError
from rljax.hf.spec import takes_pictures

if TYPE_CHECKING:
    import torch

    from rljax.engines.cuda.transports.broadcast import BroadcastGroup
    from rljax.engines.cuda.transports.ipc import Gather, TorchIpc

KEY = "sglang.transport"


def routes(config: Config, allocation: Allocation) -> tuple[str, ...]:
    """Returns the transports to SGLang servers that the run starts, best first.

    That is the one of `sglang.transport`, or all possible ones. Raises UserError if it isn't
    possible.
    """
    possible = _possible(config, allocation)
    wanted = SglangConfig.of(config).transport
    if not wanted:
        return possible
    if wanted not in TRANSPORTS:
        raise UserError(f"{KEY}: no transport named {wanted!r} (one of {', '.join(TRANSPORTS)}; empty: the best one)")
    if wanted not in possible:
        raise UserError(f"{KEY}: {wanted} is not possible with {allocation} (possible: {', '.join(possible)})")
    return (wanted,)


def _possible(config: Config, allocation: Allocation) -> tuple[str, ...]:
    sampler, learner = allocation.sampler, allocation.learner
    if sampler is None or learner is None:
        return TRANSPORTS
    if takes_pictures(config.actor.path) and not config.actor.init_from_scratch:
        return ("directory",)  # the others send a text model's names
    handles = ("ipc",) if sampler.size == learner.size else ()  # one rank of the learner per device of a server
    if SglangConfig.of(config).device == "cpu":
        return ("gloo", *handles, "directory")
    if sampler.first_device == learner.first_device:
        return (*handles, "directory")  # NCCL needs a device per rank
    return ("nccl", "directory")


@dataclasses.dataclass
class Route:
    """A torch learner's transport to the servers of a sampler.

    It is kept between publishes, for a broadcast's group is reused.

    Example:
        route = Route(ExportToSampler("nccl", Pool("sglang", data=2)))
        return route.source((name, tensor) for name, tensor in model.named_parameters())
    """

    target: ExportToSampler
    host: str = "127.0.0.1"  # address of this process, as the servers see it
    bucket_bytes: int = BUCKET
    wait: float = 450.0  # seconds: Config.control_timeout
    gather: Gather | None = None  # for ipc, by a learner of several ranks; None for one rank
    _group: BroadcastGroup | None = None

    def source(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightSource:
        """Makes the source of whole tensors under HF names, which are taken as they are sent.

        Raises UserError for "directory".
        """
        return WeightsBroadcast(self._sender(tensors))

    def _sender(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Sender:
        transport, devices = self.target.transport, self.target.pool.tensor
        if transport == "ipc":
            return self._ipc(tensors)
        if transport in ("nccl", "gloo"):
            from rljax.engines.cuda.transports.broadcast import BroadcastGroup, TorchBroadcast

            self._group = self._group or BroadcastGroup(transport, devices, self.host, self.wait)
            return TorchBroadcast(tensors, self._group, self.bucket_bytes)
        raise UserError(f"{KEY}: {transport} can't send weights from memory (export to a directory)")

    def _ipc(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> TorchIpc:
        from rljax.engines.cuda.transports.ipc import TorchIpc, gather_alone

        return TorchIpc(tensors, self.target.pool.tensor, self.gather or gather_alone, self.bucket_bytes)

    def follow(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gathers with rank 0 while its source is sent; called on all other ranks. Blocks."""
        if self.target.transport == "ipc":
            self._ipc(tensors).follow()
        else:
            for _ in tensors:
                pass

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
