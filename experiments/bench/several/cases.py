"""All cases, by part."""

from __future__ import annotations

from rljax.experiments.bench.several import engines, faults, runs
from rljax.experiments.bench.several.case import PARTS, Case
from rljax.experiments.bench.several.place import Place


def cases(place: Place) -> list[Case]:
    """Returns all cases, those that take more cards than there are included."""
    found = [
        *engines.learners(place),
        *engines.samplers(place),
        *runs.runs(place),
        *engines.publishes(place),
        *faults.faults(place),
        *runs.moves(place),
    ]
    return sorted(found, key=lambda case: PARTS.index(case.part))
