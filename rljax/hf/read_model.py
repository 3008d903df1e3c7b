"""Reads what a model directory holds, of a family with an implementation here or another."""

from __future__ import annotations

from pathlib import Path

from rljax.hf.other_model import Model, parse
from rljax.hf.spec import CONFIG, MODEL_TYPES, ModelSpec, read_config
from rljax.hf.weights import WeightReader


def read_model(directory: Path | str) -> Model:
    """Reads the `ModelSpec` of a directory, or the facts of a model of another family.

    Raises UserError for a missing or damaged file, or a model that no engine trains.
    """
    config, where = read_config(directory), str(Path(directory) / CONFIG)
    if config.get("model_type") in MODEL_TYPES or "vision_config" in config:
        return ModelSpec.from_config(config, where)
    return parse(config, WeightReader(directory).shapes, where)
