"""Where a torch learner's checkpoint has the parts of `rljax.checkpoints.portable`, and reading it with no learner made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rljax.backends.torch import checkpoint
from rljax.checkpoints.integrity import verify
from rljax.checkpoints.portable import COUNTS, LazyState
from rljax.engine import State

PARTS = {  # -> of the tree, whose tensors are at <path>/<HF name>
    "params": "policy",
    "mu": "rl/actor/mu",
    "nu": "rl/actor/nu",
    "supervised/mu": "supervised/mu",
    "supervised/nu": "supervised/nu",
    "critic/params": "rl/critic/params",
    "critic/mu": "rl/critic/mu",
    "critic/nu": "rl/critic/nu",
    "reference": "rl/reference",
}
COUNTED = {"actor": "rl/actor/count", "critic": "rl/critic/count", "supervised": "supervised/count"}


def read(directory: Path) -> State:
    """Raises UserError where a file is missing or changed."""
    verify(directory)
    paths: dict[str, dict[str, str]] = {COUNTS: {}}  # part -> HF name -> path
    parts = {path: part for part, path in PARTS.items()}
    counted = {path: name for name, path in COUNTED.items()}
    for path in checkpoint.stored_names(directory):
        where, _, name = path.rpartition("/")
        if path in counted:
            paths[COUNTS][counted[path]] = path
        elif where in parts:
            paths.setdefault(parts[where], {})[name] = path

    def of_part(part: str) -> Mapping[str, np.ndarray]:
        arrays = checkpoint.read_host(directory, paths[part].values()) if paths[part] else {}
        return {name: arrays[path] for name, path in paths[part].items()}

    return LazyState(paths, of_part)
