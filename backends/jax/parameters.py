"""Each parameter of a `Transformer`, declared once: where it stands, the HF tensor it is, the mesh
axes it is split over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from rljax.hf.spec import ModelSpec
from rljax.hf.tensors import EMBEDDING, FINAL_NORM, UNEMBEDDING, layer_tensor, norms, projections

INTO_RESIDUAL = ("o_proj", "down_proj")  # tensor-parallel over their inputs, the others over their outputs


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One leaf of the parameter tree.

    Example: Parameter(("layers", "q_proj", "kernel"), "self_attn.q_proj.weight", (30, 576, 576),
    (None, "fsdp", "tensor"))
    """

    path: tuple[str, ...]
    tensor: str  # HF name; of a stacked one, the part after "model.layers.N."
    shape: tuple[int, ...]  # of the JAX array
    axes: tuple[str | None, ...]  # mesh axis of each dimension
    stacked: bool = True  # first dimension is the layer
    transposed: bool = True  # HF keeps [outputs, inputs]

    def tensor_of(self, layer: int) -> str:
        """HF name of a layer's slice; of the whole where it is not stacked."""
        return layer_tensor(layer, self.tensor) if self.stacked else self.tensor


def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Lists all parameters of a model."""
    table = ("tensor", "fsdp")
    found = [Parameter(("embed_tokens", "kernel"), EMBEDDING, (spec.vocab_size, spec.hidden_size), table, False, False)]
    for name, (outputs, inputs, bias) in projections(spec).items():
        short = name.split(".")[-1]
        axes = ("tensor", "fsdp") if short in INTO_RESIDUAL else ("fsdp", "tensor")
        found.append(
            Parameter(("layers", short, "kernel"), f"{name}.weight", (spec.num_layers, inputs, outputs), (None, *axes))
        )
        if bias:
            out = None if short in INTO_RESIDUAL else "tensor"
            found.append(
                Parameter(("layers", short, "bias"), f"{name}.bias", (spec.num_layers, outputs), (None, out), transposed=False)
            )
    for name, size in norms(spec).items():
        path = ("layers", name.split(".")[-1], "scale")
        found.append(Parameter(path, f"{name}.weight", (spec.num_layers, size), (None, None), transposed=False))
    found.append(Parameter(("norm", "scale"), FINAL_NORM, (spec.hidden_size,), (None,), False, False))
    if not spec.tie_word_embeddings:
        shape = (spec.vocab_size, spec.hidden_size)
        found.append(Parameter(("lm_head", "kernel"), UNEMBEDDING, shape, table, False, False))
    return tuple(found)


def adapters(spec: ModelSpec, rank: int, targets: Collection[str]) -> tuple[Parameter, ...]:
    """The LoRA factors beside the projections in `targets`, under the names that peft has for them
    in a HF file.
    """
    found = []
    for base in parameters(spec):
        if base.path[1] not in targets or base.path[2:] != ("kernel",):
            continue
        layers, inputs, outputs = base.shape
        (_, into, out), stem, place = base.axes, base.tensor.removesuffix("weight"), base.path[:2]
        found.append(Parameter((*place, "lora_a"), f"{stem}lora_A.weight", (layers, inputs, rank), (None, into, None)))
        found.append(Parameter((*place, "lora_b"), f"{stem}lora_B.weight", (layers, rank, outputs), (None, None, out)))
    return tuple(found)


def nested(leaves: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """Path -> leaf as a nested dict."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def leaf_at(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    """The leaf of a nested dict at a path."""
    for key in path:
        tree = tree[key]
    return tree
