"""Files of a model directory beside its weights: config, generation config, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rljax.errors import UserError
from rljax.hf.other_model import Model
from rljax.hf.rope import rope_fields
from rljax.hf.spec import CONFIG, ModelSpec, read_config, takes_pictures
from rljax.hf.turn_ends import write_turn_ends
from rljax.hf.weights import write_json

COPIED = (  # files to copy if the source has them
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "processor_config.json",
    "preprocessor_config.json",
)


def write_companions(directory: Path, spec: Model, dtype: str, source: Path | None) -> None:
    """Writes config.json, and copies generation config and tokenizer from the source.

    The directory is created if missing.

    Args:
      dtype: dtype of the weights that are written there.
      source: the directory the model came from. None: config.json is made from the spec, and
        there is no tokenizer.

    Raises:
      UserError: the disk is full or not writable.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = spec.to_config() if source is None else _config(source)
        write_json(directory / CONFIG, config | {"dtype": dtype} | _before_5(config, spec, dtype))
        if source is not None:
            copy_tokenizer(source, directory)
        write_turn_ends(directory, source=source)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written: {error.strerror or error}") from None


def _before_5(config: dict[str, Any], spec: Model, dtype: str) -> dict[str, Any]:
    """Returns what transformers before 5 reads in place of `dtype` and `rope_parameters`.

    Without them it takes its defaults for both, in silence.
    """
    if not isinstance(config.get("rope_parameters"), dict):
        return {"torch_dtype": dtype}
    if not isinstance(spec, ModelSpec):
        return {"torch_dtype": dtype, **_flat_rope(config["rope_parameters"])}
    scaling = {key: value for key, value in rope_fields(spec.ropes[0]).items() if key != "rope_theta"}
    rope: dict[str, Any] = {"rope_theta": spec.ropes[0].theta, "rope_scaling": scaling}
    if spec.ropes[0].type == "default":
        rope["rope_scaling"] = None
    if len(spec.ropes) > 1:
        rope["rope_local_base_freq"] = spec.ropes[1].theta
    return {"torch_dtype": dtype, **rope}


def _flat_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields before 5 of a rope that all layers have; none where layers differ."""
    if "rope_theta" not in fields:
        return {}
    scaling = {key: value for key, value in fields.items() if key not in ("rope_theta", "partial_rotary_factor")}
    before: dict[str, Any] = {"rope_theta": fields["rope_theta"]}
    before["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if "partial_rotary_factor" in fields:
        before["partial_rotary_factor"] = fields["partial_rotary_factor"]
    return before


def _config(source: Path) -> dict[str, Any]:
    """Returns the config of an export: whole where pictures are taken, else of the text model."""
    if takes_pictures(source):
        config: dict[str, Any] = json.loads((source / CONFIG).read_text())
        return config
    return read_config(source)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copies generation config and tokenizer from a model directory. Raises OSError."""
    for name in COPIED:
        if (path := source / name).is_file():
            shutil.copyfile(path, directory / name)
