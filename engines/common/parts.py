"""Maps the parts of `rljax.checkpoints.portable` to a learner's checkpoint; which are required."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rljax.checkpoints.portable import COUNTS, LazyState
from rljax.engine import PortableState
from rljax.errors import UserError

PARTS = {  # part -> path of its subtree
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
COUNTED = {"actor": "rl/actor/count", "critic": "rl/critic/count", "supervised": "supervised/count"}  # optimizer steps
NEEDED = (
    "params",
    "mu",
    "nu",
    "supervised/mu",
    "supervised/nu",
)  # required; a critic or a reference may keep its initial value


def parts_of(state: PortableState, own: Collection[str]) -> list[str]:
    """Lists the learner's own parts that a portable state replaces.

    Raises UserError if a required part is missing.
    """
    for part in own:
        if part in NEEDED and part not in state:
            raise UserError(f"checkpoint: the other engine's state lacks {part} (was it written with this config?)")
    return [part for part in own if part in state]


def counts_of(state: PortableState, updates: int) -> dict[str, int]:
    """Returns optimizer steps by the names of `COUNTED`.

    The policy's are `updates` if the state has no counts.
    """
    counts = state.get(COUNTS, {})
    return {"actor": updates} | {name: int(counts[name]) for name in COUNTED if name in counts}


def stored_state(
    paths: Collection[str], read: Callable[[str], Mapping[str, np.ndarray]], read_count: Callable[[str], Any]
) -> LazyState:
    """Makes a lazy state of a checkpoint: one part is read at a time.

    Args:
      paths: paths of all its arrays, such as "rl/actor/count".
      read: returns the arrays of the non-empty subtree at a path, by HF name.
      read_count: returns the integer at a path.
    """
    parts = [part for part, path in PARTS.items() if any(stored.startswith(path + "/") for stored in paths)]
    counted = {name: path for name, path in COUNTED.items() if path in paths}

    def read_part(part: str) -> Mapping[str, np.ndarray]:
        if part != COUNTS:
            return read(PARTS[part])
        return {name: np.asarray(read_count(path), np.int64) for name, path in counted.items()}

    return LazyState([*parts, COUNTS], read_part)
