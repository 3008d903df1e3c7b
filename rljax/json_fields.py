"""Fields of JSON files that others wrote: kinds, ranges, and one line for what breaks them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rljax.errors import UserError

T = TypeVar("T")


class Kind(NamedTuple):
    """Kind of a field: what it may hold, in words and as a test."""

    text: str
    holds: Callable[[Any], bool]
    parts: Callable[[Any], Iterator[tuple[str, Any, Kind]]] | None = None  # (path behind the name, value, kind) of each part
    needed: tuple[str, ...] = ()  # fields that an object must have


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (_is_int(value) and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value))


def integer(least: int, most: int) -> Kind:
    """Returns the kind of integers in [least, most]."""
    return Kind(f"an integer from {least} to {most}", lambda value: _is_int(value) and least <= value <= most)


def number(least: float, most: float) -> Kind:
    """Returns the kind of finite numbers in [least, most]."""
    return Kind(f"a number from {least:g} to {most:g}", lambda value: _is_number(value) and least <= value <= most)


TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
REAL = Kind("a number", lambda value: isinstance(value, float) or (_is_int(value) and abs(value) < 2**63))  # NaN, infinity too
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
FILE_NAMES = Kind(
    "an object of names of files in the directory",
    lambda value: (
        isinstance(value, dict)
        and all(isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name for name in value.values())
    ),
)
_TOKEN_ID = integer(0, 2**31 - 1)
TOKEN_IDS = Kind(
    "a token id, or a list of them",
    lambda value: all(map(_TOKEN_ID.holds, value)) if isinstance(value, list) else _TOKEN_ID.holds(value),
)
_SIZE = integer(0, 2**63 - 1)
_PAIR = Kind("a pair", lambda value: isinstance(value, list) and len(value) == 2 and all(map(_SIZE.holds, value)))
RECORDS = Kind(
    "an object of [size, checksum] by file", lambda value: isinstance(value, dict) and all(map(_PAIR.holds, value.values()))
)

Schema = Mapping[str, Kind]
ANYTHING = Kind("any value", lambda value: True)


def optional(kind: Kind) -> Kind:
    """Returns a kind that may be null as well."""
    parts = kind.parts
    return Kind(
        f"{kind.text}, or null",
        lambda value: value is None or kind.holds(value),
        parts and (lambda value: iter(()) if value is None else parts(value)),
        kind.needed,
    )


def one_of(words: Iterable[str]) -> Kind:
    """Returns the kind of some texts."""
    known = tuple(words)
    return Kind(f"one of {', '.join(known)}", lambda value: isinstance(value, str) and value in known)


def listed(kind: Kind, length: int | None = None) -> Kind:
    """Returns the kind of lists of another kind, of any length or of one."""
    return Kind(
        "a list" if length is None else f"a list of {length}",
        lambda value: isinstance(value, list) and length in (None, len(value)),
        lambda value: ((f"[{index}]", item, kind) for index, item in enumerate(value)),
    )


def named(kind: Kind) -> Kind:
    """Returns the kind of objects whose values are of another kind, under any names."""
    return Kind(
        "an object",
        lambda value: isinstance(value, dict),
        lambda value: ((f".{name}", item, kind) for name, item in value.items()),
    )


def fields(schema: Schema, *, needed: Iterable[str] | None = None) -> Kind:
    """Returns the kind of objects with some fields, of which all that are `needed` are there.

    Args:
      needed: names; None for all of the schema's. Further fields may hold anything.
    """
    return Kind(
        "an object",
        lambda value: isinstance(value, dict),
        lambda value: ((f".{name}", value[name], kind) for name, kind in schema.items() if name in value),
        tuple(schema if needed is None else needed),
    )


@functools.cache
def kind_of(type_: Any) -> Kind:
    """Returns the kind of JSON values that a type is written as; of a dataclass its fields.

    Example: kind_of(Mapping[str, int | None])
    """
    origin, inner = typing.get_origin(type_), typing.get_args(type_)
    if dataclasses.is_dataclass(type_):
        hints = typing.get_type_hints(type_)
        own = dataclasses.fields(type_)
        needed = [f.name for f in own if f.default is f.default_factory is dataclasses.MISSING]
        return fields({f.name: kind_of(hints[f.name]) for f in own}, needed=needed)
    if origin in (typing.Union, types.UnionType):
        (one,) = (each for each in inner if each is not types.NoneType)
        return optional(kind_of(one))
    if origin is not None and issubclass(origin, Mapping):
        return named(kind_of(inner[1]))
    if origin is not None and issubclass(origin, Sequence):
        return listed(kind_of(inner[0]))
    if isinstance(type_, type) and issubclass(type_, enum.StrEnum):
        return one_of(type_)
    return _PLAIN[type_]


_PLAIN = {
    bool: TRUTH,
    int: integer(-(2**63), 2**63 - 1),
    float: number(-math.inf, math.inf),
    str: TEXT,
    object: ANYTHING,
}


def read_as(type_: type[T], tree: Any, where: str) -> T:
    """Makes a dataclass of its fields in JSON; others are left out. Raises UserError."""
    demand(tree, kind_of(typing.cast(Any, type_)), where)
    return type_(**{field.name: tree[field.name] for field in dataclasses.fields(type_) if field.name in tree})  # type: ignore[arg-type]


def read(path: Path) -> Any:
    """Reads a JSON file. Raises FileNotFoundError, or UserError if it can't be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {' '.join(str(error).split())}") from None


def read_object(path: Path, schema: Schema, *, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads a JSON object, and holds its fields against a schema. Null counts as a missing field.

    Raises:
      FileNotFoundError: there is no such file.
      UserError: it can't be read, or a field is missing or of another kind.
    """
    content = read(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object")
    check(content, schema, str(path))
    for name in needed:
        if content.get(name) is None:
            raise UserError(f"{path}: no {name!r}")
    return content


def check(content: Mapping[str, Any], schema: Schema, where: str) -> None:
    """Raises UserError at the first field that is of another kind than its schema says."""
    for name, kind in schema.items():
        require(content.get(name), kind, f"{where}: {name}")


def require(value: Any, kind: Kind, name: str) -> None:
    """Raises UserError unless a value is of a kind, or None."""
    if value is not None:
        demand(value, kind, name)


def demand(value: Any, kind: Kind, name: str) -> None:
    """Raises UserError, which names the innermost field, unless a value is of a kind."""
    if not kind.holds(value):
        raise UserError(f"{name} must be {kind.text}, not {shown(value)}")
    if value is not None and (missing := [each for each in kind.needed if each not in value]):
        raise UserError(f"{name}: no {missing[0]!r}")
    for path, part, inner in kind.parts(value) if kind.parts else ():
        demand(part, inner, f"{name}{path}")


def shown(value: Any) -> str:
    """Returns the beginning of a value in JSON, for a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
