"""Reads a torch learner's checkpoint without making a learner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rljax.backends.torch import checkpoint
from rljax.checkpoints.integrity import verify
from rljax.engine import PortableState
from rljax.engines.common.parts import stored_state


def read(directory: Path) -> PortableState:
    """Returns the parts of `rljax.checkpoints.portable` that a checkpoint has.

    Raises UserError if a file is missing or changed.
    """
    verify(directory)
    stored = checkpoint.stored_names(directory)

    def read_at(path: str) -> Mapping[str, np.ndarray]:
        names = {name.rpartition("/")[2]: name for name in stored if name.rpartition("/")[0] == path}
        arrays = checkpoint.read_host(directory, names.values())
        return {name: arrays[stored_name] for name, stored_name in names.items()}

    return stored_state(stored, read_at, lambda path: checkpoint.read_host(directory, [path])[path])
