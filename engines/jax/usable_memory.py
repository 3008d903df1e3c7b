"""The part of a device's memory that JAX may use."""

from __future__ import annotations

import math
import os

from rljax.chips import GIB, TPU, Chip

ON_GPU = 0.75  # share of a GPU that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
ON_TPU = GIB // 4  # bytes of a TPU that are not for programs


def usable(chip: Chip) -> float:
    """Returns the bytes of a device that JAX may use."""
    if chip.memory is None:
        return math.inf
    if chip.platform == TPU:
        return chip.memory - ON_TPU
    return chip.memory * float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ON_GPU))
