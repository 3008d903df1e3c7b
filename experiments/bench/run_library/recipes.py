"""The runs of the library by name: healthy ones, and those with one fault each."""

from __future__ import annotations

from collections.abc import Mapping

from rljax.config.registry import nearest
from rljax.errors import UserError
from rljax.experiments.bench.run_library.faulty import FAULTS
from rljax.experiments.bench.run_library.healthy import HEALTHY
from rljax.experiments.bench.run_library.recipe import Recipe

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in (*HEALTHY, *FAULTS)}


def find(name: str) -> Recipe:
    """Returns the recipe of a name. Raises UserError for an unknown one."""
    if name not in RECIPES:
        raise UserError(f"{name}: no such run ({nearest(name, RECIPES)}; --list has them all)")
    return RECIPES[name]
