"""Tracebacks of users' code, without the frames that call it."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import rljax

LAST = 3  # frames that are shown of an error that has none of users' code
_OURS = (str(Path(rljax.__file__).parent), sysconfig.get_paths()["stdlib"], "<frozen ")


def shown(error: BaseException) -> str:
    """Returns the traceback of an error that users' code caused, from its first frame there on.

    Of a chain it is that of the first error. A note of another process's traceback stands for the
    traceback itself. Empty for one of rljax.errors without a frame of users' code: its message says
    it all.
    """
    seen: set[int] = set()
    while True:
        if notes := getattr(error, "__notes__", ()):
            return "\n".join(notes)
        seen.add(id(error))
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None or id(cause) in seen:  # `raise error from error` makes a chain without an end
            break
        error = cause
    parsed = traceback.TracebackException.from_exception(error)
    parsed.__cause__ = parsed.__context__ = None
    theirs = next((i for i, frame in enumerate(parsed.stack) if not frame.filename.startswith(_OURS)), -LAST)
    if theirs == -LAST and type(error).__module__ == "rljax.errors":
        return ""
    parsed.stack = traceback.StackSummary.from_list(parsed.stack[theirs:])
    return "".join(parsed.format()).rstrip()


def place_of(error: BaseException) -> str:
    """Returns file and line of the last frame of users' code, `my_rewards.py:12`; "" without one."""
    stack = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in stack if not frame.filename.startswith(_OURS)]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else ""
