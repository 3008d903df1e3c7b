"""Reads what a model directory holds, of a family with an implementation here or another."""

from __future__ import annotations

from pathlib import Path

from rljax.errors import UserError
from rljax.hf.other_model import Model, parse
from rljax.hf.spec import CONFIG, DEFAULTS, MODEL_TYPES, ModelSpec, read_config
from rljax.hf.weights import WeightReader


def read_model(directory: Path | str) -> Model:
    """Reads the `ModelSpec` of a directory, or the facts of a model of another family.

    Raises UserError for a missing or damaged file, or a model that no engine trains.
    """
    config, where = read_config(directory), str(Path(directory) / CONFIG)
    if config.get("model_type") in MODEL_TYPES or "vision_config" in config:
        return ModelSpec.from_config(config, where)
    return parse(config, WeightReader(directory).shapes, where)


def check_stored(directory: Path | str) -> None:
    """Checks a directory that an engine reads by itself: all readers have to find one model in it.

    Without config.json and safetensors it checks nothing. Raises UserError for two models in it, or
    a head that is not the embedding where config.json ties them.
    """
    if not _has_weights(directory):
        return
    reader, config = WeightReader(directory), read_config(directory)
    of_family = DEFAULTS.get(MODEL_TYPES.get(str(config.get("model_type")), ""), {})
    if config.get("tie_word_embeddings", of_family.get("tie_word_embeddings", False)):
        reader.check_head()


def check_unread(directory: Path | str) -> None:
    """Checks a directory that nobody here reads, as an engine that reads it does: every number.

    Tensors and their shapes have to be those of config.json where the family is implemented here.
    Without config.json and safetensors it checks nothing, and of quantized weights the numbers that
    are plain.

    Raises UserError that names the file and the tensor. Takes about a second per GB, and the disk's
    time.
    """
    if not _has_weights(directory):
        return
    reader = WeightReader(directory)
    if not read_config(directory).get("quantization_config"):
        try:
            spec = read_model(directory)
        except UserError:  # of a family or a setting that only the engine knows: it says what is wrong
            pass
        else:
            reader.check(spec)
    reader.check_numbers()


def _has_weights(directory: Path | str) -> bool:
    return (Path(directory) / CONFIG).is_file() and any(Path(directory).glob("*.safetensors"))
