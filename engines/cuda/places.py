"""Where the places of `rljax.portable` are in a torch learner's checkpoint, and that checkpoint read with no learner made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rljax.backends.torch import checkpoint
from rljax.checksums import verify
from rljax.engine import State
from rljax.portable import COUNTS, Places

PLACES = {  # -> of the tree, whose tensors are at <path>/<HF name>
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
    paths: dict[str, dict[str, str]] = {COUNTS: {}}  # place -> HF name -> path
    places = {path: place for place, path in PLACES.items()}
    counted = {path: name for name, path in COUNTED.items()}
    for path in checkpoint.stored_names(directory):
        where, _, name = path.rpartition("/")
        if path in counted:
            paths[COUNTS][counted[path]] = path
        elif where in places:
            paths.setdefault(places[where], {})[name] = path

    def of_place(place: str) -> Mapping[str, np.ndarray]:
        arrays = checkpoint.read_host(directory, paths[place].values()) if paths[place] else {}
        return {name: arrays[path] for name, path in paths[place].items()}

    return Places(paths, of_place)
