"""Architecture of a model as its `config.json` says it, in one frozen, hashable value."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljax import json_fields
from rljax.errors import UserError
from rljax.hf.rope import RopeSpec, parse_rope, rope_fields

CONFIG = "config.json"
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
TEXT_PARTS = {"gemma3": "gemma3_text"}  # model_type of an image-text model, and of the text model in it
TAKES_PICTURES = ("llava",)  # model_type of image-text models whose pictures the fsdp learner takes
# Fields that an image-text config.json may have outside of text_config
OF_BOTH = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")

# Defaults of transformers for fields that a config.json lacks.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "max_position_embeddings": 2048},
    "qwen2": {"tie_word_embeddings": False, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    "gemma3": {
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}
_SIZE, _COUNT = json_fields.integer(1, 2**24), json_fields.integer(1, 2**16)
OF_ANY_FAMILY: json_fields.Schema = {  # fields of config.json that are read of every model
    "model_type": json_fields.TEXT,
    "architectures": json_fields.TEXTS,
    "quantization_config": json_fields.OBJECT,
    "text_config": json_fields.OBJECT,
    "vision_config": json_fields.OBJECT,
    **dict.fromkeys(("vocab_size", "hidden_size", "head_dim"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "num_hidden_layers"), _COUNT),
    "sliding_window": json_fields.integer(1, 2**31),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window"), json_fields.TRUTH),
    "final_logit_softcapping": json_fields.number(1e-6, 1e9),
    "layer_types": json_fields.TEXTS,
    **dict.fromkeys(("rope_parameters", "rope_scaling"), json_fields.OBJECT),
}
SCHEMA: json_fields.Schema = {  # and of the families here, beside those of ropes (rope.py); of others they may be anything
    **OF_ANY_FAMILY,
    "intermediate_size": _SIZE,
    **dict.fromkeys(("num_key_value_heads", "sliding_window_pattern"), _COUNT),
    "max_position_embeddings": json_fields.integer(1, 2**31),
    "max_window_layers": json_fields.integer(0, 2**16),
    **dict.fromkeys(("hidden_act", "hidden_activation"), json_fields.TEXT),
    "rms_norm_eps": json_fields.number(0, 1),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), json_fields.number(1, 1e12)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bidirectional_attention"), json_fields.TRUTH),
    **dict.fromkeys(("query_pre_attn_scalar", "attn_logit_softcapping"), json_fields.number(1e-6, 1e9)),
}
COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Hashable, so that a compiled program can be keyed by it.

    Example: ModelSpec.from_directory(Path("models/SmolLM2-135M-Instruct")).num_layers == 30
    """

    architecture: str  # "llama", "qwen2", "qwen3", "gemma3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens
    activation: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of o_proj
    mlp_bias: bool
    qk_norm: bool  # RMS norm of queries and keys over head_dim
    gemma_norms: bool  # norms scale by 1 + w, and follow attention and feed-forward too
    embedding_scale: float
    attention_scale: float  # factor of query times key
    attention_softcap: float | None
    final_softcap: float | None
    windows: tuple[int | None, ...]  # per layer: tokens visible to a token, itself included; None: all
    ropes: tuple[RopeSpec, ...]
    rope_of_layer: tuple[int, ...]  # index into ropes

    @classmethod
    def from_directory(cls, directory: Path | str) -> ModelSpec:
        """Reads the spec of a model directory.

        Raises UserError for a missing directory or config.json, or a model that is not implemented.
        """
        return cls.from_config(read_config(directory), str(Path(directory) / CONFIG))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = CONFIG) -> ModelSpec:
        """Makes the spec of a parsed config.json. `where` names it in errors."""
        return _parse(config, where)

    def to_config(self) -> dict[str, Any]:
        """Returns a config.json that transformers reads as the same model."""
        return _unparse(self)

    @property
    def sliding(self) -> bool:
        """True if some layer has a window."""
        return any(window is not None for window in self.windows)


def read_config(directory: Path | str) -> dict[str, Any]:
    """Parses the config.json of a model directory; of an image-text model, its text part.

    Raises UserError.
    """
    directory = Path(directory)
    path = directory / CONFIG
    if not directory.is_dir():
        raise UserError(f"{directory}: no such model directory (a HF directory with {CONFIG} and *.safetensors)")
    if not path.is_file():
        raise UserError(f"{directory}: no {CONFIG} (a HF model directory has one beside its *.safetensors)")
    config, where = json_fields.read_object(path, OF_ANY_FAMILY), f"{path}: text_config"
    if config.get("model_type") in MODEL_TYPES:
        json_fields.check(config, SCHEMA, str(path))
    json_fields.check(config.get("text_config") or {}, {"model_type": json_fields.TEXT}, where)
    part = _text_part(config)
    if part is not config:  # fields of text models that are not read here may be anything
        json_fields.check(config["text_config"], SCHEMA, where)
    return part


def is_image_text(directory: Path | str) -> bool:
    """Returns whether a model directory has a text model inside one for images and text."""
    try:
        config = json.loads((Path(directory) / CONFIG).read_text())
    except (OSError, ValueError, RecursionError):  # whoever loads it says what is wrong
        return False
    return isinstance(config, dict) and config.get("model_type") in (*TEXT_PARTS, *TAKES_PICTURES)


def takes_pictures(directory: Path | str) -> bool:
    """Returns whether the fsdp learner takes pictures for the model of a directory."""
    try:
        config = json.loads((Path(directory) / CONFIG).read_text())
    except (OSError, ValueError, RecursionError):  # whoever loads it says what is wrong
        return False
    return isinstance(config, dict) and config.get("model_type") in TAKES_PICTURES


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of the text model inside an image-text one, or the config itself."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    shared = {key: config[key] for key in OF_BOTH if key in config}
    part = TEXT_PARTS.get(config.get("model_type", ""))
    if config.get("model_type") in TAKES_PICTURES and text.get("model_type") in MODEL_TYPES:
        part = text["model_type"]
        shared["tie_word_embeddings"] = config.get("tie_word_embeddings", False)  # of the whole, as transformers reads it
        text = {key: value for key, value in text.items() if key not in shared}
    if part is None:
        return config
    return {**shared, **text, "model_type": part, "architectures": [CLASSES[MODEL_TYPES[part]]]}


def read_vocab_size(directory: Path | str) -> int | None:
    """Returns the number of token ids of a model, by its config.json; None without one."""
    if not (Path(directory) / CONFIG).is_file():
        return None
    config = read_config(directory)
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) else None


def _architecture(config: Mapping[str, Any], where: str) -> str:
    supported = ", ".join(CLASSES.values())
    model_type = config.get("model_type")
    if "vision_config" in config and model_type not in MODEL_TYPES:
        raise UserError(
            f"{where}: {model_type!r} is an image-text model: the JAX path and the learners take text models only "
            f"({supported}); SGLang samples from it (sglang.enable_multimodal), rljax compare compares it"
        )
    if model_type not in MODEL_TYPES:
        raise UserError(
            f"{where}: model_type {model_type!r} is not supported (supported: {supported}; "
            "sglang and fsdp take other causal models too: docs/families.md)"
        )
    architecture = MODEL_TYPES[model_type]
    classes = config.get("architectures") or [CLASSES[architecture]]
    if CLASSES[architecture] not in classes:
        raise UserError(f"{where}: architecture {classes[0]!r} is not supported (supported: {supported})")
    if config.get("quantization_config"):
        raise UserError(f"{where}: the weights are quantized (quantization_config); use a directory with plain weights")
    return architecture


class _Fields:
    """Fields of a config, with the architecture's defaults; raises UserError for a missing one."""

    def __init__(self, config: Mapping[str, Any], architecture: str, where: str) -> None:
        self.config = config
        self.defaults = COMMON | DEFAULTS[architecture]
        self.where = where

    def __getitem__(self, name: str) -> Any:
        """Returns a field that must have a value."""
        value = self.optional(name)
        if value is None:
            raise UserError(f"{self.where}: no {name!r}")
        return value

    def optional(self, name: str) -> Any:
        """Returns the field, or the architecture's default if the config does not have it.

        None if there is no default, or if the config says null.
        """
        return self.config[name] if name in self.config else self.defaults.get(name)

    def size(self, name: str) -> int:
        """Returns a field that must be a positive integer."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{self.where}: {name} must be a positive integer, not {value!r}")
        return value


def _parse(config: Mapping[str, Any], where: str) -> ModelSpec:
    json_fields.check(config, OF_ANY_FAMILY, where)
    architecture = _architecture(config, where)
    json_fields.check(config, SCHEMA, where)
    fields = _Fields(config, architecture, where)
    gemma = architecture == "gemma3"
    hidden, heads, layers = (fields.size(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = fields.size("head_dim") if fields.optional("head_dim") else hidden // heads
    if head_dim < 1:
        raise UserError(f"{where}: hidden_size {hidden} is less than num_attention_heads {heads}")
    kv_heads = fields.size("num_key_value_heads") if fields.optional("num_key_value_heads") else heads
    if heads % kv_heads:
        raise UserError(f"{where}: {heads} attention heads are no multiple of {kv_heads} key/value heads")
    activation = fields["hidden_activation" if gemma else "hidden_act"]
    if activation not in ACTIVATIONS:
        raise UserError(f"{where}: activation {activation!r} is not implemented (implemented: {', '.join(ACTIVATIONS)})")
    if gemma and fields.optional("use_bidirectional_attention"):
        raise UserError(f"{where}: use_bidirectional_attention is not implemented: policies are causal")
    layer_types = _layer_types(fields, architecture, layers)
    ropes, rope_of_layer = _ropes(fields, architecture, layer_types)
    bias = bool(fields["attention_bias"])
    return ModelSpec(
        architecture=architecture,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.size("max_position_embeddings"),
        activation=activation,
        rms_norm_eps=float(fields["rms_norm_eps"]),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        qkv_bias=architecture == "qwen2" or bias,
        output_bias=architecture != "qwen2" and bias,
        mlp_bias=architecture == "llama" and bool(fields["mlp_bias"]),
        qk_norm=architecture in ("qwen3", "gemma3"),
        gemma_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_scale=(fields["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5,
        attention_softcap=fields.optional("attn_logit_softcapping") if gemma else None,
        final_softcap=fields.optional("final_logit_softcapping") if gemma else None,
        windows=tuple(fields.size("sliding_window") if kind == "sliding_attention" else None for kind in layer_types),
        ropes=ropes,
        rope_of_layer=rope_of_layer,
    )


def _layer_types(fields: _Fields, architecture: str, layers: int) -> list[str]:
    """Returns `sliding_attention` or `full_attention` for each layer."""
    if architecture == "llama":
        return ["full_attention"] * layers
    if architecture != "gemma3" and not fields["use_sliding_window"]:
        return ["full_attention"] * layers
    types = fields.optional("layer_types")
    if types is None and architecture == "gemma3":
        pattern = fields.size("sliding_window_pattern")  # one layer in so many has full attention
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    elif types is None:
        types = ["sliding_attention" if i >= fields["max_window_layers"] else "full_attention" for i in range(layers)]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise UserError(f"{fields.where}: layer type {sorted(unknown)[0]!r} is not implemented")
    if len(types) != layers:
        raise UserError(f"{fields.where}: layer_types has {len(types)} entries for {layers} layers")
    return list(types)


def _ropes(fields: _Fields, architecture: str, layer_types: list[str]) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """Returns the kinds of rotary embedding, and the index of each layer's kind.

    transformers 5 writes `rope_parameters`, flat or by layer type; earlier versions write
    `rope_theta` and `rope_scaling`.
    """
    length = fields.size("max_position_embeddings")
    theta = float(fields["rope_theta"])
    new, old = fields.optional("rope_parameters"), fields.optional("rope_scaling")
    if architecture != "gemma3":
        source = old or new or {}
        return (parse_rope(source, theta, length, fields.where),), (0,) * len(layer_types)
    new = new or {}
    full = {**(new.get("full_attention") or {}), **(old or {})}
    local = new.get("sliding_attention") or {}
    by_type = {
        "full_attention": parse_rope(full, theta, length, fields.where),
        "sliding_attention": parse_rope(local, float(fields["rope_local_base_freq"]), length, fields.where),
    }
    return tuple(by_type.values()), tuple(list(by_type).index(kind) for kind in layer_types)


def _unparse(spec: ModelSpec) -> dict[str, Any]:
    gemma = spec.architecture == "gemma3"
    layer_types = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
    config: dict[str, Any] = {
        "architectures": [CLASSES[spec.architecture]],
        "model_type": {name: model_type for model_type, name in MODEL_TYPES.items()}[spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_activation" if gemma else "hidden_act": spec.activation,
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
    }
    if spec.architecture != "qwen2":
        config["attention_bias"] = spec.qkv_bias
    if spec.architecture == "llama":
        config["mlp_bias"] = spec.mlp_bias
    else:
        windows = {window for window in spec.windows if window is not None}
        config["layer_types"] = layer_types
        config["sliding_window"] = windows.pop() if windows else DEFAULTS[spec.architecture]["sliding_window"]
        if not gemma:
            config["use_sliding_window"] = spec.sliding
    if gemma:
        scalar = spec.attention_scale**-2
        config["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar
        config["attn_logit_softcapping"], config["final_logit_softcapping"] = spec.attention_softcap, spec.final_softcap
        full, local = spec.ropes
        config["rope_parameters"] = {"full_attention": rope_fields(full), "sliding_attention": rope_fields(local)}
    else:
        config["rope_parameters"] = rope_fields(spec.ropes[0])
        config["rope_theta"] = spec.ropes[0].theta  # for readers older than rope_parameters
    return config
