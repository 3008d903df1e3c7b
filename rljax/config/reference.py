"""Writes docs/config.md from the schema: a table of all keys.

python -m rljax.config.reference > docs/config.md
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from typing import Any

from rljax import entry_points
from rljax.config import engine_sections
from rljax.config.keys import Leaf, leaves_of, sections_of, unwrap_optional
from rljax.config.schema import Config

_INTRODUCTION = """\
# Every key of the config

Written by `python -m rljax.config.reference` from the schema (`rljax/config/schema/`); don't edit it.

A config file is a Python file with a `get_config()` that starts from `base.get_config()` of `configs/base.py` and sets what
differs; `--config.KEY=VALUE` sets a key on the command line. An optional key takes `None`, a list commas (`a,b`) or a
Python literal, and a dict its keys (`--config.train_dataset.task.max_operand=20`). A key that does not
exist is an error that names the nearest one that does, or what a [name of TRL's, verl's or OpenRLHF's](coming-from.md) is
here; where nothing is near, all keys of its section. `actor.recompute_logprobs` means `actor.recompute_logprob`.

The sections at the end belong to the engines of this package, and are used by a run whose `allocation_mode` names the engine.
An engine of another package has a section under its own name, which its author describes.
"""
_COLUMNS = ("key", "type", "default", "range or choices", "unit", "meaning")
_OWN = "rljax."  # where the modules of this package's engines begin


def page() -> str:
    """Returns the text of docs/config.md."""
    parts = [_INTRODUCTION]
    for path, values in sections_of(Config(), ""):
        parts.append(_section(path, values))
    for name in sorted({point.name for point in entry_points.installed() if point.value.startswith(_OWN)}):
        if schema := engine_sections.find(name):
            parts += [_section(path, values) for path, values in sections_of(schema(), name)]
    return "\n".join(parts)


def _section(path: str, values: Any) -> str:
    title = f"## `{path}`" if path else "## The run"
    rows = [_row(_COLUMNS), _row(["---"] * len(_COLUMNS)), *(_row(_cells(leaf)) for leaf in leaves_of(values, path))]
    about, _, _ = (inspect.getdoc(values) or "").partition("\n\n")
    return "\n".join([title, "", " ".join(about.split()), "", *rows, ""])


def _cells(leaf: Leaf) -> list[str]:
    allowed = ", ".join(f"`{choice}`" for choice in leaf.key.choices) or (leaf.key.within.text if leaf.key.within else "")
    return [f"`{leaf.path}`", _type(leaf.type), f"`{leaf.value!r}`", allowed, leaf.key.unit, leaf.key.description]


def _type(kind: Any) -> str:
    optional, kind = unwrap_optional(kind)
    origin = typing.get_origin(kind) or kind
    text = f"list of {typing.get_args(kind)[0].__name__}" if origin is tuple else origin.__name__
    return f"{text} or None" if optional else text


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
