"""Disk of a checkpoint: free space, write errors, syncing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

DISK_ERRORS = (  # the system's own phrases, to be found in a library's long message
    "No space left on device",
    "File too large",
    "Disk quota exceeded",
    "Permission denied",
    "Read-only file system",
)


def check_room(directory: Path, needed: int) -> None:
    """Raises OSError if fewer than `needed` bytes are free. Call it before a write."""
    if needed > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {needed / 1e6:.0f} MB")


def free_mb(directory: Path) -> int:
    """Returns the free space in MB where the directory is or would be."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free >> 20


def reason(error: Exception) -> str:
    """Returns the message of an error in one line; for a full disk, the system's own phrase."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return next((phrase for phrase in DISK_ERRORS if phrase in text), text[:200] or type(error).__name__)


def os_error_behind(error: BaseException | None) -> OSError | None:
    """Returns the operating system's error that caused an exception; None if there is none.

    Frameworks wrap such errors in their own.
    """
    seen: set[int] = set()  # `raise error from error` makes a chain without an end
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def sync_tree(directory: Path) -> None:
    """Syncs a directory and everything below it to the disk."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
