"""Installed engines by name: the entry points of the group `rljax.engines`.

    names()         # ["fake", "fsdp", "http", "jax", "sglang"]: nothing is imported
    load("jax")     # the engine's plugin

A third party adds one to its package; its name is the engine's in `allocation_mode` and of its
section in the config.
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
def installed() -> tuple[metadata.EntryPoint, ...]:
    """Entry points of installed packages; a checkout that runs without an install brings its own
    from pyproject.toml.
    """
    found = list(metadata.entry_points(group=GROUP))
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if pyproject.is_file():
        own = tomllib.loads(pyproject.read_text())["project"]["entry-points"][GROUP]
        found += [metadata.EntryPoint(name, value, GROUP) for name, value in own.items()]
    return tuple(found)


def names() -> list[str]:
    """Names of the installed engines, sorted."""
    return sorted({point.name for point in installed()})


def load(name: str) -> Any:
    """Imports an engine's plugin.

    Raises:
      UserError: no engine of this name, two of it, or one whose module can't be imported.
    """
    found = [point for point in installed() if point.name == name]
    if not found:
        raise UserError(f"no engine named {name!r} (installed: {', '.join(names())})")
    if len({point.value for point in found}) > 1:
        raise UserError(f"the engine name {name!r} is registered twice: {', '.join(point.value for point in found)}")
    try:
        return found[0].load()
    except Exception as error:  # the module may be anyone's: it may raise anything
        reason = " ".join(str(error).split())
        raise UserError(
            f"the engine {name!r} can't be loaded from {found[0].value}: {type(error).__name__}: {reason}"
        ) from error
