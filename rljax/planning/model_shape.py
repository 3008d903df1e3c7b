"""Shape of a model that is planned for, from its directory."""

from __future__ import annotations

from rljax.errors import UserError
from rljax.hf.spec import MODEL_TYPES, ModelSpec, read_config


def shape_in(directory: str) -> ModelSpec:
    """Reads the shape of a model directory; of its files config.json alone.

    Raises UserError for a family that can't be planned for, or a config.json that can't be read.
    """
    described = read_config(directory)
    family = described.get("model_type")
    if family not in MODEL_TYPES and "vision_config" not in described:
        raise UserError(
            f"actor.path: a plan knows the layers of {', '.join(MODEL_TYPES)} alone, not those of {family}"
            " (--shape=NAME plans for a published model of about its size)"
        )
    return ModelSpec.from_directory(directory)
