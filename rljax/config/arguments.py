"""Ranges of numbers among arguments that a config passes on, as `rollout.workflow_args`.

They are declared where they are used, by the constructor that takes them:

    check("rollout.workflow_args", max_turns=(max_turns, COUNT), discount=(discount, UNIT))
"""

from __future__ import annotations

import math

from rljax.config.keys import NOT_NEGATIVE, POSITIVE, UNIT, Range
from rljax.errors import UserError

COUNT = Range("at least 1", lambda x: x >= 1 and isinstance(x, int))
SECONDS = Range("seconds, above 0", POSITIVE.holds)
FINITE = Range("a finite number", math.isfinite)

__all__ = ["COUNT", "FINITE", "NOT_NEGATIVE", "SECONDS", "UNIT", "check"]


def check(prefix: str, **given: tuple[object, Range]) -> None:
    """Checks numbers, each with its range. None, for no limit, always passes.

    Args:
      prefix: what stands before the names in a message.

    Raises:
      UserError: a value is no number, or out of its range; as "PREFIX.NAME: -1 (in [0, 1])".
    """
    for name, (value, within) in given.items():
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not within.holds(value):
            raise UserError(f"{prefix}.{name}: {value!r} ({within.text})")
