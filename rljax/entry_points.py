"""Installed engines by name: the entry points of the group `rljax.engines`; and those of any group.

    names()         # ["fake", "fsdp", "http", "jax", "sglang"]: nothing is imported
    load("jax")     # the engine's plugin

A third party declares an entry point in its own package. The entry point's name is the name of the
engine in `allocation_mode` and of its section in the config.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from rljax.errors import UserError

GROUP = "rljax.engines"


@functools.cache
def installed(group: str = GROUP) -> tuple[metadata.EntryPoint, ...]:
    """Returns the entry points of a group, by default those of engines.

    They come from installed packages, and from pyproject.toml in a checkout that is not installed.
    """
    found = list(metadata.entry_points(group=group))
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if pyproject.is_file():
        own = tomllib.loads(pyproject.read_text())["project"]["entry-points"].get(group, {})
        found += [metadata.EntryPoint(name, value, group) for name, value in own.items()]
    return tuple(found)


def names() -> list[str]:
    """Returns the names of the installed engines, sorted."""
    return sorted({point.name for point in installed()})


def load(name: str) -> Any:
    """Imports an engine's plugin.

    Raises:
      UserError: no engine or more than one has this name, or its module can't be imported.
    """
    found = [point for point in installed() if point.name == name]
    if not found:
        raise UserError(f"no engine named {name!r} (installed: {', '.join(names())})")
    if len({point.value for point in found}) > 1:
        raise UserError(f"the engine name {name!r} is registered twice: {', '.join(point.value for point in found)}")
    try:
        return found[0].load()
    except Exception as error:  # a third party's module may raise anything
        reason = " ".join(str(error).split())
        raise UserError(
            f"the engine {name!r} can't be loaded from {found[0].value}: {type(error).__name__}: {reason}"
        ) from error
