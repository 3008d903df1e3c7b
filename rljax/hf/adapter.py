"""LoRA adapters as peft writes them: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from rljax import json_fields
from rljax.config.schema import ActorConfig, LoraConfig
from rljax.errors import UserError
from rljax.hf.other_model import Model
from rljax.hf.read_model import read_model
from rljax.hf.tensor_checks import count_not_finite
from rljax.hf.tensors import layer_tensor, projections

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
A, B = "lora_A.weight", "lora_B.weight"  # after the projection's name
_PREFIX = "base_model.model."
_SETTINGS: json_fields.Schema = {
    "peft_type": json_fields.TEXT,
    "r": json_fields.integer(1, 2**31),
    "lora_alpha": json_fields.number(-1e9, 1e9),
}
# Settings of peft that would add something else than alpha / rank B A, and the values that don't
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
}


def check(actor: ActorConfig, model_dir: Path) -> None:
    """Checks before anything is loaded that a run can go on from the adapter of `actor.lora.path`.

    Args:
      model_dir: directory of the policy.

    Raises:
      UserError: as `read_adapter`.
    """
    if actor.lora.path:
        read_adapter(actor.lora.path, read_model(model_dir), actor.lora)


def read_adapter(directory: Path | str, spec: Model, config: LoraConfig) -> dict[str, np.ndarray]:
    """Reads the adapter that a run goes on from.

    Args:
      config: its rank, alpha and projections have to be those of `actor.lora`.

    Returns:
      Factors in float32 by their name in the model, as "model.layers.0.mlp.up_proj.lora_A.weight":
      A is [rank, inputs], B is [outputs, rank].

    Raises:
      UserError: it can't be read, is of another rank, alpha or model, or is no plain LoRA.
    """
    directory = Path(directory)
    _check(directory, _settings(directory), config)
    try:
        stored = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"actor.lora.path: cannot read {directory / WEIGHTS}: {' '.join(str(error).split())}") from None
    for name, array in stored.items():
        if count_not_finite(array):
            raise UserError(
                f"actor.lora.path: {directory / WEIGHTS}: tensor {name!r} has NaN or infinity (an earlier checkpoint)"
            )
    found = {name.removeprefix(_PREFIX): array.astype(np.float32) for name, array in stored.items()}
    shapes = _shapes(spec, config)
    for name, shape in shapes.items():
        has = found[name].shape if name in found else None
        if has != shape:
            what = "is missing" if has is None else f"has shape {list(has)}, and the model's is {list(shape)}"
            raise UserError(f"actor.lora.path: {directory}: tensor {name!r} {what}")
    if others := sorted(found.keys() - shapes.keys()):
        raise UserError(
            f"actor.lora.path: {directory} has {others[0]!r}, which actor.lora.target_modules="
            f"{','.join(config.target_modules)} leaves out"
        )
    return found


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / SETTINGS
    try:
        settings = json_fields.read_object(path, _SETTINGS)
    except FileNotFoundError as error:
        raise UserError(f"actor.lora.path: cannot read {path}: {error.strerror} (a directory that peft wrote)") from None
    except UserError as error:
        raise UserError(f"actor.lora.path: {error} (a directory that peft wrote)") from None
    if settings.get("peft_type") != "LORA":
        raise UserError(f"actor.lora.path: {path}: no LoRA adapter (peft_type)")
    return settings


def _check(directory: Path, settings: Mapping[str, Any], config: LoraConfig) -> None:
    for ours, theirs, value in (("rank", "r", config.rank), ("alpha", "lora_alpha", config.alpha)):
        if settings.get(theirs) != value:
            raise UserError(
                f"actor.lora.{ours}: {value:g}, and the adapter of {directory} has {settings.get(theirs)} ({theirs})"
            )
    for name, plain in _PLAIN.items():
        if settings.get(name) not in plain:
            has = json_fields.shown(settings.get(name))
            raise UserError(f"actor.lora.path: {directory / SETTINGS} has {name}={has}: only alpha / rank B A is implemented")


def _shapes(spec: Model, config: LoraConfig) -> dict[str, tuple[int, int]]:
    """Returns the shapes of all factors that the model has with these projections."""
    shapes = {}
    for projection, (outputs, inputs, _) in projections(spec).items():
        if projection.split(".")[-1] in config.target_modules:
            for layer in range(spec.num_layers):
                shapes[layer_tensor(layer, f"{projection}.{A}")] = (config.rank, inputs)
                shapes[layer_tensor(layer, f"{projection}.{B}")] = (outputs, config.rank)
    return shapes
