"""Names and shapes of the tensors of a model directory, of any family."""

from __future__ import annotations

import math
import re

from rljax.hf.other_model import Model, OtherModel
from rljax.hf.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
UNEMBEDDING = "lm_head.weight"


def layer_tensor(layer: int, name: str) -> str:
    """Returns the name of a layer's tensor.

    Example: layer_tensor(3, "mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    """
    return f"model.layers.{layer}.{name}"


def projections(spec: Model) -> dict[str, tuple[int, int, bool]]:
    """Returns the linear maps of a layer: HF name -> (outputs, inputs, has a bias).

    Of another family, those that `layer_tensor` names; none if it names its layers otherwise.
    """
    if isinstance(spec, OtherModel):
        return _stored_projections(spec)
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "self_attn.q_proj": (queries, hidden, spec.qkv_bias),
        "self_attn.k_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.v_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, queries, spec.output_bias),
        "mlp.gate_proj": (mlp, hidden, spec.mlp_bias),
        "mlp.up_proj": (mlp, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, mlp, spec.mlp_bias),
    }


def _stored_projections(model: OtherModel) -> dict[str, tuple[int, int, bool]]:
    found = {}
    for name, shape in model.shapes.items():
        match = re.fullmatch(r"model\.layers\.0\.(.+)\.weight", name)
        if match and len(shape) == 2:
            found[match[1]] = (*shape, layer_tensor(0, f"{match[1]}.bias") in model.shapes)
    return found


def matrix_parameters(spec: Model) -> int:
    """Returns the number of weights in the matrices of all layers, without embedding and
    unembedding.
    """
    if isinstance(spec, OtherModel):
        matrices = (shape for shape in spec.shapes.values() if len(shape) == 2 and shape[0] != spec.vocab_size)
        return sum(map(math.prod, matrices))
    return spec.num_layers * sum(outputs * inputs for outputs, inputs, _ in projections(spec).values())


def norms(spec: ModelSpec) -> dict[str, int]:
    """Returns the RMS norms of a layer: HF name -> width."""
    sizes = {"input_layernorm": spec.hidden_size, "post_attention_layernorm": spec.hidden_size}
    if spec.gemma_norms:
        sizes |= {"pre_feedforward_layernorm": spec.hidden_size, "post_feedforward_layernorm": spec.hidden_size}
    if spec.qk_norm:
        sizes |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    return sizes


def tensors(spec: Model) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of a model directory, in the order they are written."""
    if isinstance(spec, OtherModel):
        return dict(spec.shapes)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        for name, (outputs, inputs, bias) in projections(spec).items():
            shapes[layer_tensor(layer, f"{name}.weight")] = (outputs, inputs)
            if bias:
                shapes[layer_tensor(layer, f"{name}.bias")] = (outputs,)
        for name, size in norms(spec).items():
            shapes[layer_tensor(layer, f"{name}.weight")] = (size,)
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes[UNEMBEDDING] = (spec.vocab_size, spec.hidden_size)
    return shapes


def parameter_count(spec: Model) -> int:
    """Returns the number of parameters; a tied unembedding counts once."""
    return sum(math.prod(shape) for shape in tensors(spec).values())
