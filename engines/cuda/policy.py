"""The policy's network on this rank, and the sets of weights that take turns in it.

There is one sharded module. Policy, critic and reference are contents of its parameters: those of the policy are there, and
another's are put in their place for as long as it is at work. So the module is built, gathered and compiled once, and a
critic beside LoRA shares the frozen base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rljax.backends.torch import lora, model
from rljax.backends.torch.mesh import Layout, local
from rljax.backends.torch.optim import Slot
from rljax.config.schema import Config
from rljax.engines.cuda.config import FsdpConfig
from rljax.hf.activations import checkpointing
from rljax.hf.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Weights = list[Tensor]  # a shard of every trained parameter, in their order


class Policy:
    """A network whose trained parameters (all of them, or the adapters) are float32 and whose contents can be exchanged.

    Example: with policy.holding(critic_weights): values = named_values(policy.network, head, rows)
    """

    def __init__(self, config: Config, layout: Layout, model_dir: Path) -> None:
        actor = config.actor
        self.layout = layout
        self.dtype = DTYPES[actor.dtype]
        self.spec = ModelSpec.from_directory(model_dir)
        adapted = actor.lora.rank > 0
        self.network = model.build(
            self.spec,
            model_dir,
            layout,
            dtype=self.dtype,
            base_dtype=self.dtype if adapted else torch.float32,  # a frozen base needs no master copy
            remat=checkpointing(actor.gradient_checkpointing, 0, None),  # auto: a server may have most of the memory
            compile=FsdpConfig.of(config).compile and layout.device.type == "cuda",
            adapt=lora.adder(actor.lora) if adapted else None,
        )
        model.read_weights(self.network, model_dir)
        everything = dict(model.parameters(self.network))
        if adapted:
            lora.initialize(everything, self.spec, actor.lora, config.seed)
        self.frozen: dict[str, DTensor] = {n: p for n, p in everything.items() if not p.requires_grad}
        self.trained: dict[str, DTensor] = {n: p for n, p in everything.items() if p.requires_grad}

    def weights(self) -> Weights:
        """The shards of what is trained: the storage itself."""
        return [local(parameter) for parameter in self.trained.values()]

    def named(self, weights: Weights) -> dict[str, Tensor]:
        """Weights by the names of their parameters."""
        return dict(zip(self.trained, weights, strict=True))

    def copied(self, dtype: torch.dtype) -> Weights:
        """A copy of them."""
        return [shard.to(dtype, copy=True) for shard in self.weights()]

    def slots(self) -> list[Slot]:
        """What an optimizer steps, under the contents of the moment."""
        return [
            Slot(name, local(parameter), _gradient_of(parameter), self.layout.copies(parameter))
            for name, parameter in self.trained.items()
        ]

    def forget_gradients(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None

    @torch.no_grad()
    def scored(self, function: Callable[[Any], Tensor], parts: Iterable[Any]) -> list[Tensor]:
        """function(rows) of every micro-batch, forward only."""
        try:
            return [function(rows) for rows in parts]
        finally:
            model.reshard(self.network)  # else what was gathered would outlive the contents it was gathered from

    @contextlib.contextmanager
    def holding(self, others: Weights) -> Iterator[None]:
        """With contents exchanged for those of others, and back; what is changed meanwhile is others'."""
        _exchange(self.weights(), others)
        try:
            yield
        finally:
            _exchange(self.weights(), others)

    @contextlib.contextmanager
    def reading(self, others: Weights) -> Iterator[None]:
        """With contents that equal others', of any dtype, and back. One more copy of the shards is held meanwhile."""
        kept = self.copied(torch.float32)
        self.fill(others)
        try:
            yield
        finally:
            self.fill(kept)

    def fill(self, others: Sequence[Tensor]) -> None:
        for shard, other in zip(self.weights(), others, strict=True):
            shard.copy_(other)


def _gradient_of(parameter: DTensor) -> Callable[[], Tensor | None]:
    return lambda: None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]


def _exchange(ours: Weights, theirs: Weights) -> None:
    for a, b in zip(ours, theirs, strict=True):
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
