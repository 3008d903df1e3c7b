"""A case: one thing that is measured, with the cards that it takes and the time it needs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from rljax.experiments.bench.several.place import Place, Row

PARTS = ("learners", "samplers", "runs", "publish", "faults", "move")
LARGEST = 8  # cards


@dataclasses.dataclass(frozen=True)
class Case:
    """Something that is measured by itself.

    Example: Case("learners", "qwen3-0.6b fsdp:f2", 2, 60.0, measure)
    """

    part: str
    what: str
    cards: int
    seconds: float  # estimate, on cards; a case may take LIMIT times as long
    measure: Callable[[Place, str, float], list[Row]]  # of place, name and time limit; raises Failed

    @property
    def name(self) -> str:
        return f"{self.part}/{self.what}"


LIMIT = 3.0


def cards_of(mode: str) -> int:
    """Returns the devices that an allocation_mode takes. Example: "sglang:d2|fsdp:f2" -> 2"""
    sizes = [_size(pool) for pool in re.split(r"[+|]", mode)]
    return max(sizes) if "|" in mode else sum(sizes)


def _size(pool: str) -> int:
    size = 1
    for count in re.findall(r"[dtpcf](\d+)", pool.partition(":")[2]):
        size *= int(count)
    return size


def needs_sglang(case: Case) -> bool:
    return "sglang" in case.what
