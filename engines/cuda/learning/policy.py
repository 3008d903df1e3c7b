"""The policy's network on this rank, and the sets of weights that take turns in it.

There is one sharded module. Its parameters hold the policy's weights; those of the critic or the
reference are put there while they are in use. So the module is built, gathered and compiled once,
and a critic with LoRA shares the frozen base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rljax.backends.torch import lora, model, packing_probe
from rljax.backends.torch.mesh import RankMesh, local
from rljax.backends.torch.optim import TrainedParameter
from rljax.config.schema import Config
from rljax.engines.cuda.config import FsdpConfig
from rljax.hf.activations import checkpointing
from rljax.hf.other_model import OtherModel
from rljax.hf.read_model import read_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Weights = list[Tensor]  # one shard per trained parameter, in order


class Policy:
    """A network whose trained parameters (all, or the adapters) are float32 and can be exchanged.

    Example:
        with policy.swapped_in(critic_weights):
            values = target_values(policy.network, head, rows)
    """

    def __init__(self, config: Config, rank_mesh: RankMesh, model_dir: Path, *, described: bool = False) -> None:
        """Described: parameters are not filled, and layers are compiled as on a GPU."""
        actor = config.actor
        self.rank_mesh = rank_mesh
        self.dtype = DTYPES[actor.dtype]
        self.spec = read_model(model_dir)
        adapted = actor.lora.rank > 0
        self.network = model.build(
            self.spec,
            model_dir,
            rank_mesh,
            dtype=self.dtype,
            base_dtype=self.dtype if adapted else torch.float32,  # a frozen base needs no master copy
            remat=checkpointing(actor.gradient_checkpointing, 0, None),  # auto: a server may have most of the memory
            compile=FsdpConfig.of(config).compile and (described or rank_mesh.device.type == "cuda"),
            adapt=lora.adder(actor.lora) if adapted else None,
        )
        if not described:
            model.read_weights(self.network, model_dir)
        everything = dict(model.parameters(self.network))
        if adapted and not described:
            lora.initialize(everything, self.spec, actor.lora, config.seed)
        if isinstance(self.spec, OtherModel) and not described:
            packing_probe.check(self.network, model_dir, rank_mesh, self.dtype)
        self.frozen: dict[str, DTensor] = {n: p for n, p in everything.items() if not p.requires_grad}
        self.trained: dict[str, DTensor] = {n: p for n, p in everything.items() if p.requires_grad}

    def weights(self) -> Weights:
        """Returns this rank's shards of the trained parameters: the storage itself."""
        return [local(parameter) for parameter in self.trained.values()]

    def by_name(self, weights: Weights) -> dict[str, Tensor]:
        """Maps the names of the trained parameters to these weights."""
        return dict(zip(self.trained, weights, strict=True))

    def copied(self, dtype: torch.dtype) -> Weights:
        """Copies the shards of the trained parameters."""
        return [shard.to(dtype, copy=True) for shard in self.weights()]

    def trained_parameters(self) -> list[TrainedParameter]:
        """Lists the trained parameters for an optimizer."""
        return [
            TrainedParameter(name, local(parameter), _gradient_of(parameter), self.rank_mesh.replicas(parameter))
            for name, parameter in self.trained.items()
        ]

    def forget_gradients(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None

    @torch.no_grad()
    def scored(self, function: Callable[[Any], Tensor], parts: Iterable[Any]) -> list[Tensor]:
        """Returns function(rows) of each micro-batch, forward only."""
        try:
            return [function(rows) for rows in parts]
        finally:
            model.reshard(self.network)  # or gathered parameters would outlive the weights they were gathered from

    @contextlib.contextmanager
    def swapped_in(self, weights: Weights) -> Iterator[None]:
        """Swaps `weights` into the network, and back on exit.

        Changes that are made meanwhile end up in `weights`.
        """
        _exchange(self.weights(), weights)
        try:
            yield
        finally:
            _exchange(self.weights(), weights)

    @contextlib.contextmanager
    def copied_in(self, weights: Weights) -> Iterator[None]:
        """Copies `weights`, of any dtype, into the network, and the old ones back on exit.

        Takes the memory of one more copy of the shards meanwhile.
        """
        kept = self.copied(torch.float32)
        self.fill(weights)
        try:
            yield
        finally:
            self.fill(kept)

    def fill(self, weights: Sequence[Tensor]) -> None:
        for shard, other in zip(self.weights(), weights, strict=True):
            shard.copy_(other)


def _gradient_of(parameter: DTensor) -> Callable[[], Tensor | None]:
    return lambda: None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]


def _exchange(ours: Weights, theirs: Weights) -> None:
    for a, b in zip(ours, theirs, strict=True):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
