"""The disk under a checkpoint: free space, errors of a failed write, syncing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

DISK_ERRORS = (  # the system's own words, which come out of a library's long message
    "No space left on device",
    "File too large",
    "Disk quota exceeded",
    "Permission denied",
    "Read-only file system",
)


def check_room(directory: Path, needed: int) -> None:
    """Raises OSError where fewer than `needed` bytes are free; to be called before a write."""
    if needed > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {needed / 1e6:.0f} MB")


def free_mb(directory: Path) -> int:
    """Free space where the directory is or would be, in MB."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free >> 20


def reason(error: Exception) -> str:
    """Returns an error in one line; of a full disk, what the system calls it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    return next((words for words in DISK_ERRORS if words in text), text[:200] or type(error).__name__)


def os_error_behind(error: BaseException | None) -> OSError | None:
    """Finds the operating system's error behind an exception: frameworks wrap it.

    None where there is none.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def sync_tree(directory: Path) -> None:
    """Has the system write a directory, and all that is below it, to the disk."""
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def sync(path: Path) -> None:
    """Has the system write a file or a directory's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
