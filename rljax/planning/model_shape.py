"""Shape of a model that is planned for, from its directory or the config that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljax.config.schema import ActorConfig
from rljax.errors import UserError
from rljax.hf.init import spec_of
from rljax.hf.spec import CONFIG, MODEL_TYPES, ModelSpec, read_config
from rljax.hf.tokenizer import vocabulary_of


def shape_in(directory: str) -> ModelSpec:
    """Reads the shape of a model directory; of its files config.json alone.

    Raises UserError for a family that can't be planned for, or a config.json that can't be read.
    """
    described = read_config(directory)
    if not _has_shape(described):
        raise UserError(
            f"actor.path: a plan knows the layers of {', '.join(MODEL_TYPES)} alone, not those of"
            f" {described.get('model_type')} (--shape=NAME plans for a published model of about its size)"
        )
    return ModelSpec.from_directory(directory)


def missing(actor: ActorConfig) -> str:
    """Returns the directory without which the model's shape can't be looked up; "" if it is here."""
    if actor.init_from_scratch:
        tokenizer = actor.init.tokenizer
        return "" if tokenizer == "char" or Path(tokenizer).is_dir() else tokenizer
    return "" if (Path(actor.path) / CONFIG).is_file() else actor.path


def shape_here(actor: ActorConfig) -> ModelSpec | None:
    """Returns the shape of a config's model, which is not `missing`; None for another family's.

    Raises UserError for what can't be read.
    """
    if actor.init_from_scratch:
        return spec_of(actor.init, vocabulary_of(actor.init.tokenizer))
    return ModelSpec.from_directory(actor.path) if _has_shape(read_config(actor.path)) else None


def _has_shape(described: dict[str, Any]) -> bool:
    """Returns whether a config.json is of a family whose layers are known."""
    return described.get("model_type") in MODEL_TYPES or "vision_config" in described
