"""Tensor parallelism: attention heads, feed-forward width and vocabulary are split over ranks.

Shoeybi et al. 2019, arXiv:1909.08053. Hidden states are whole on every rank between the blocks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from rljax.errors import UserError
from rljax.hf.other_model import Model
from rljax.hf.spec import ModelSpec
from rljax.hf.splits import check_tensor


def parallelize(causal: Any, spec: Model, mesh: DeviceMesh) -> None:
    """Splits the parameters of a model on the meta device over a mesh with one axis.

    Raises UserError for a family that no plan is known for.
    """
    if not isinstance(spec, ModelSpec):
        raise UserError(f"allocation_mode: fsdp splits the family {spec.architecture!r} over d and f only, not t")
    check_tensor(spec, mesh.size(), key_heads=True)
    plan: dict[str, Any] = {
        **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    if spec.qk_norm:  # on [r, T, heads, D]: each rank has its own heads, and the gradients of the shared scale add up
        plan |= {f"self_attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True) for name in ("q_norm", "k_norm")}
    for layer in causal.model.layers:
        parallelize_module(layer, mesh, {part: style for name in plan for part, style in _parts(layer, name, plan[name])})
    if spec.vocab_size % mesh.size() == 0:
        _split_vocabulary(causal, mesh)


def _parts(layer: nn.Module, name: str, style: Any) -> list[tuple[str, Any]]:
    """Splits a projection with adapters where the base is split: B by outputs, or A by inputs."""
    if not hasattr(layer.get_submodule(name), "base_layer"):
        return [(name, style)]
    factor = "lora_B" if isinstance(style, ColwiseParallel) else "lora_A"
    return [(f"{name}.base_layer", style), (f"{name}.{factor}.default", type(style)())]


def _split_vocabulary(causal: Any, mesh: DeviceMesh) -> None:
    tied = causal.lm_head.weight is causal.model.embed_tokens.weight
    parallelize_module(causal.model, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if tied:
        causal.lm_head.weight = causal.model.embed_tokens.weight
    else:
        parallelize_module(causal, mesh, {"lm_head": ColwiseParallel()})


def vocabulary_group(causal: nn.Module, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Returns the ranks that have a shard of the unembedding each; None if every rank has it whole."""
    return mesh.get_group() if hasattr(causal.lm_head.weight, "device_mesh") else None  # type: ignore[union-attr]
