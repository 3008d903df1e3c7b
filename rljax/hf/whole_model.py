"""Writes the weights of a model directory, with the tower of an image-text model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from rljax.hf.other_model import Model
from rljax.hf.spec import takes_pictures
from rljax.hf.tensors import tensors
from rljax.hf.weights import WeightReader, write_weights


def write_model(directory: Path, spec: Model, read: Callable[[str], np.ndarray], dtype: str, source: Path) -> None:
    """Writes the safetensors of a model that came from `source`.

    Args:
      read: returns a tensor of the text model by name; called in the order of `tensors`.
      source: its directory. What a model for pictures has beside its text model is copied from
        there.

    Raises:
      UserError: the disk is full or not writable, or the source is damaged.
    """
    shapes = tensors(spec)
    if not takes_pictures(source):
        write_weights(directory, shapes, read, dtype)
        return
    reader = WeightReader(source)
    names = {reader.stored_name(name): name for name in shapes}
    stored = {name: shapes[text] for name, text in names.items()} | reader.shapes_of_pictures()
    write_weights(directory, stored, lambda name: read(names[name]) if name in names else reader.read_of_pictures(name), dtype)
