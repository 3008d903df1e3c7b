"""Where a learner's checkpoint has the parts of `rljax.checkpoints.portable`, and which of them it
can't do without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rljax.checkpoints.portable import COUNTS, LazyState
from rljax.engine import PortableState
from rljax.errors import UserError

PARTS = {  # -> path of the subtree
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
NEEDED = ("params", "mu", "nu", "supervised/mu", "supervised/nu")  # a critic or a reference may stay as it began


def parts_of(state: PortableState, own: Collection[str]) -> list[str]:
    """Those of a learner's own parts that a state replaces.

    Raises UserError where one that is needed is missing.
    """
    for part in own:
        if part in NEEDED and part not in state:
            raise UserError(f"checkpoint: nothing of {part} in the state of another engine (is it of this config?)")
    return [part for part in own if part in state]


def counts_of(state: PortableState, updates: int) -> dict[str, int]:
    """Optimizer steps by name, as in `COUNTED`; the policy's are `updates` where the state has no
    counts.
    """
    counts = state.get(COUNTS, {})
    return {"actor": updates} | {name: int(counts[name]) for name in COUNTED if name in counts}


def stored_state(
    paths: Collection[str], read: Callable[[str], Mapping[str, np.ndarray]], read_count: Callable[[str], Any]
) -> LazyState:
    """The state in a checkpoint, read a part at a time.

    Args:
      paths: of all its arrays, as "rl/actor/count".
      read: arrays by HF name of the subtree at a path, which has some.
      read_count: the integer at a path.
    """
    parts = [part for part, path in PARTS.items() if any(stored.startswith(path + "/") for stored in paths)]
    counted = {name: path for name, path in COUNTED.items() if path in paths}

    def of_part(part: str) -> Mapping[str, np.ndarray]:
        if part != COUNTS:
            return read(PARTS[part])
        return {name: np.asarray(read_count(path), np.int64) for name, path in counted.items()}

    return LazyState([*parts, COUNTS], of_part)
