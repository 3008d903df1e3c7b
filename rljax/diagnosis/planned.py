"""A run's plan beside what it measured, from plan.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from rljax.config.allocation import engines_of
from rljax.diagnosis.thresholds import PLANNED_MEMORY, PLANNED_TIME
from rljax.errors import UserError

SAMPLER_PEAK, LEARNER_PEAK = "memory/sampler_peak_bytes", "memory/learner_peak_bytes"
RATES = {  # key of the estimate -> measured metric, and what it is
    "learner_tokens": ("timeperf/learner_tokens_per_s", "learner"),
    "sampler_tokens": ("timeperf/sampler_tokens_per_s", "sampler"),
    "step_seconds": ("timeperf/wall", "step"),
}


@dataclasses.dataclass(frozen=True)
class Compared:
    """One figure of the plan, and what was measured of it.

    Example: Compared("learner", "GiB per device", 21.0, 24.5).is_out
    """

    what: str
    unit: str  # "GiB per device", "tokens/s" or "s"
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        """Measured over planned."""
        return self.measured / self.planned

    @property
    def is_out(self) -> bool:
        """True if the estimate was further from what was measured than a plan may be."""
        if self.unit == "GiB per device":
            return abs(self.ratio - 1) > PLANNED_MEMORY
        return not 1 / PLANNED_TIME <= self.ratio <= PLANNED_TIME

    def __str__(self) -> str:
        return f"{self.what}: {self.planned:.3g} {self.unit} planned, {self.measured:.3g} measured"


def compare(plan: Mapping[str, Any] | None) -> list[Compared]:
    """Returns the figures that plan.json has both of, memory first.

    There are none of devices that the plan doesn't know, such as a CPU.
    """
    try:
        estimated, measured = (plan or {})["estimated"], (plan or {})["measured"]
        found = [*_memory(estimated, measured), *_times(estimated, measured)]
        return [each for each in found if _positive(each.planned) and _positive(each.measured)]
    except (KeyError, TypeError, AttributeError, UserError):  # of another version, or damaged
        return []


def _positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _memory(estimated: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[Compared]:
    one_process = len(set(engines_of(estimated["allocation"]))) == 1
    for group in estimated["groups"]:
        names = {"sampler": [SAMPLER_PEAK], "learner": [LEARNER_PEAK]}.get(group["name"], [SAMPLER_PEAK, LEARNER_PEAK])
        peaks = [peak for name in names if _positive(peak := measured.get(name))]
        if group["usable"] is None or len(peaks) < len(names):
            continue
        # A framework counts what all of its process has on a device; two frameworks add up, but for what is lent
        peak = max(peaks) if one_process or group.get("in_turn") else sum(peaks)
        yield Compared(group["name"], "GiB per device", group["peak"] / 2**30, peak / 2**30)


def _times(estimated: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[Compared]:
    for key, (metric, what) in RATES.items():
        planned, found = (estimated["rates"] or {}).get(key), measured.get(metric)
        if _positive(planned) and _positive(found):
            yield Compared(what, "s" if what == "step" else "tokens/s", planned, found)
