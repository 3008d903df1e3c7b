"""Declaration of a key: default, range or choices, unit and description.

    @dataclasses.dataclass(frozen=True)
    class RewardConfig:
        workers: int = key(2, "Processes that score.", POSITIVE)
        timeout: float = key(15.0, "Limit of one call.", POSITIVE, unit="seconds")

The field's annotation is its type: int, float, str, bool, one of these or None, a tuple of one of
these, dict[str, object], or another such dataclass (made by `section`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rljax.config.registry import nearest
from rljax.errors import UserError


class Range(NamedTuple):
    """Range of numbers that a key may have, as text and as a test."""

    text: str
    holds: Callable[[Any], bool]


POSITIVE = Range("positive", lambda x: x > 0)
NOT_NEGATIVE = Range("0 or more", lambda x: x >= 0)
UNIT = Range("in [0, 1]", lambda x: 0 <= x <= 1)
HALF_OPEN_UNIT = Range("in (0, 1]", lambda x: 0 < x <= 1)
BELOW_ONE = Range("in [0, 1)", lambda x: 0 <= x < 1)
ABOVE_ONE = Range("above 1", lambda x: x > 1)


@dataclasses.dataclass(frozen=True)
class Key:
    """Metadata of a field beside its type and default."""

    description: str
    within: Range | None
    choices: tuple[str, ...]
    unit: str

    def check(self, path: str, value: Any) -> None:
        """Raises UserError for a value that is no choice or out of range.

        None, where the type allows it, always passes.
        """
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise UserError(f"{path}: no such value: {value!r} ({nearest(value, self.choices)})")
        if self.within is not None and not self.within.holds(value):
            raise UserError(f"{path}: must be {self.within.text}, not {value}")


_DECLARED = "rljax"  # in the metadata of a dataclass field: its Key, or _SECTION
_SECTION = "section"


def key(default: Any, description: str, within: Range | None = None, *, choices: Sequence[str] = (), unit: str = "") -> Any:
    """Declares one key of a section, as the value of a dataclass field."""
    metadata = {_DECLARED: Key(description, within, tuple(choices), unit)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(schema: type, **defaults: Any) -> Any:
    """Declares a section within a section.

    Args:
      schema: the section's dataclass.
      defaults: defaults that differ here from the dataclass's own.
    """
    return dataclasses.field(default_factory=functools.partial(schema, **defaults), metadata={_DECLARED: _SECTION})


class Leaf(NamedTuple):
    """A key that holds a value."""

    path: str  # dotted
    type: Any
    value: Any
    key: Key


def walk(values: Any, path: str = "") -> Iterator[Leaf]:
    """Yields all leaves of an instance of a section, those of the sections in it included."""
    for below, inner in sections_of(values, path):
        yield from leaves_of(inner, below)


def sections_of(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields an instance of a section and all sections in it, by dotted path."""
    yield path, values
    for field in dataclasses.fields(values):
        if field.metadata.get(_DECLARED) is _SECTION:
            yield from sections_of(getattr(values, field.name), join(path, field.name))


def leaves_of(values: Any, path: str = "") -> Iterator[Leaf]:
    """Yields the leaves of an instance of a section, without those of the sections in it."""
    for field in dataclasses.fields(values):
        declared = field.metadata.get(_DECLARED)
        if isinstance(declared, Key):
            yield Leaf(join(path, field.name), types_of(values)[field.name], getattr(values, field.name), declared)


def types_of(section: Any) -> dict[str, Any]:
    """Returns the types of the keys and sections that a section declares, by name.

    Args:
      section: a dataclass, or an instance of one.
    """
    schema: Any = section if isinstance(section, type) else type(section)
    return _types_of(schema)


@functools.cache
def _types_of(schema: type) -> dict[str, Any]:
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema) if _DECLARED in field.metadata}


def unwrap_optional(kind: Any) -> tuple[bool, Any]:
    """Returns (True, X) for `X | None`, else (False, kind)."""
    if isinstance(kind, types.UnionType):
        (inner,) = (part for part in typing.get_args(kind) if part is not type(None))
        return True, inner
    return False, kind


def join(path: str, name: str) -> str:
    """Appends a name to a dotted path, which may be empty."""
    return f"{path}.{name}" if path else name
