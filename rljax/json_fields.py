"""Fields of JSON files that others wrote: kinds, ranges, and one line for what breaks them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rljax.errors import UserError


class Kind(NamedTuple):
    """Kind of a field: what it may hold, in words and as a test."""

    text: str
    holds: Callable[[Any], bool]


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


def read_object(path: Path, schema: Schema, *, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads a JSON object, and holds its fields against a schema. Null counts as a missing field.

    Raises:
      FileNotFoundError: there is no such file.
      UserError: it can't be read, or a field is missing or of another kind.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
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
    if value is not None and not kind.holds(value):
        raise UserError(f"{name} must be {kind.text}, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
