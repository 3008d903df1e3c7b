"""Lines that tell of an error which ends a command."""

from __future__ import annotations

import errno
import os
import sys

from rljax.errors import GuardrailError, RankFailed, TooManyFailures, UserError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_FULL = os.strerror(errno.ENOSPC)


def reason_of(error: BaseException) -> str:
    """Returns what the screen says of an error that ends a run; of a bug its type and message."""
    if isinstance(error, UserError | TooManyFailures | RankFailed | GuardrailError):
        return str(error)
    if isinstance(error, Exception) and is_no_space(error):
        return no_space_line(error)
    return f"{type(error).__name__}: {error}"


def is_no_space(error: Exception) -> bool:
    """Returns whether an error means that the disk is full.

    Libraries in C++ and Rust (safetensors, tensorstore) raise exceptions of their own for it, with
    the system's message in their text.
    """
    return _FULL in str(error) or (isinstance(error, OSError) and error.errno in _NO_SPACE)


def no_space_line(error: Exception) -> str:
    """Names the file, where the error has it, and what to do."""
    if not getattr(error, "filename", None) and (stream := _full_stream()):
        return f"{stream}: {_FULL} (where it is redirected to; free some, and run the same command again to go on)"
    where = getattr(error, "filename", None) or "disk"
    return f"{where}: {_FULL} (free some, and run the same command again to go on)"


def _full_stream() -> str:
    """Returns the standard stream whose file takes nothing more; empty if both do."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            stream.flush()  # text that was not taken is still in it
            os.write(stream.fileno(), b"")
        except OSError as error:  # io.UnsupportedOperation, without a descriptor, is one too
            if error.errno in _NO_SPACE:
                return name
    return ""
