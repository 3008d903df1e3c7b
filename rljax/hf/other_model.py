"""Facts about a causal model of a family that rljax has no implementation of: transformers runs it.

The fsdp learner trains such a model; the JAX path takes a `ModelSpec` alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rljax.errors import UserError
from rljax.hf.spec import ModelSpec

Shape = tuple[int, ...]

# Names of one field, in the order of how common they are
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config")
_LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_logits_scale", "logits_scale")
_MOVING_ROPES = ("dynamic", "longrope", "su")  # turn by the longest row of a micro-batch
COPIES = ("lm_head.weight", "embed_out.weight")  # of a tied embedding, which some files have twice
_CONSTANTS = (".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias")  # old files have them
_OF_A_FILE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")  # fields that say nothing of the model


@dataclasses.dataclass(frozen=True)
class OtherModel:
    """A causal model, as its config.json and the headers of its safetensors describe it.

    Its fields are those of `ModelSpec` that do not depend on the family.

    Example: read_model(Path("models/Phi-3-mini-4k-instruct")).architecture == "phi3"
    """

    architecture: str  # model_type
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    final_softcap: float | None
    windows: tuple[int | None, ...]  # per layer: tokens visible to a token, itself included; None: all
    shapes: Mapping[str, Shape]  # tensors of its directory, by name
    config: Mapping[str, Any]

    def to_config(self) -> dict[str, Any]:
        """Returns its config.json without what says nothing of the model."""
        return {name: value for name, value in self.config.items() if name not in _OF_A_FILE}


Model = ModelSpec | OtherModel


def parse(config: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> OtherModel:
    """Makes the facts of a config.json and the shapes of its tensors.

    Raises UserError, which begins with `where`, for a model that packed rows or SGLang's log-probs
    would be wrong for.
    """
    _refuse(config, shapes, where)
    hidden, layers, heads = (_size(config, names, where) for names in (_HIDDEN, _LAYERS, _HEADS))
    return OtherModel(
        architecture=str(config.get("model_type")),
        vocab_size=_size(config, ("vocab_size",), where),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        head_dim=config.get("head_dim") or hidden // heads,
        final_softcap=config.get("final_logit_softcapping"),
        windows=_windows(config, layers),
        shapes={name: shape for name, shape in shapes.items() if not _is_left_out(name, config)},
        config=dict(config),
    )


def _refuse(config: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> None:
    name = config.get("model_type")
    experts = next((field for field in _EXPERTS if _is_plural(config.get(field))), None)
    scale = next((field for field in _LOGIT_SCALES if config.get(field, 1) not in (None, 1)), None)
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = ropes.get("rope_type", ropes.get("type"))
    for refused, reason in (
        (not isinstance(name, str), "no 'model_type'"),
        (experts, f"{name!r} is a mixture of experts ({experts}), which no engine trains"),
        (config.get("is_encoder_decoder"), f"{name!r} has an encoder: policies are causal models"),
        (scale, f"{name!r} scales its logits ({scale}={config.get(scale or '')!r}), which is not implemented"),
        (rope in _MOVING_ROPES, f"rope_type {rope!r} is not implemented: a row's log-probs would depend on the others'"),
        ("lm_head.bias" in shapes, f"{name!r} has a bias at its logits (lm_head.bias), which is not implemented"),
        (config.get("quantization_config"), "the weights are quantized (quantization_config); use one with plain weights"),
    ):
        if refused:
            raise UserError(f"{where}: {reason}")


def _is_plural(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, int) and value > 1)


def _size(config: Mapping[str, Any], names: tuple[str, ...], where: str) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{where}: {names[0]} must be a positive integer, not {value!r}")
    return value


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _is_left_out(name: str, config: Mapping[str, Any]) -> bool:
    return name.endswith(_CONSTANTS) or (bool(config.get("tie_word_embeddings")) and name in COPIES)
