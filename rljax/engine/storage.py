"""Directories for weights on their way to samplers: private, in memory if it is large enough.

A directory has a name that nobody can guess, and is readable by this user alone. It is locked by
the process that made it, so that whoever comes next removes what killed processes left, and
nothing that a process still uses: not in another container that shares /dev/shm either.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from rljax.errors import UserError

KEY = "rollout.publish_dir"
PREFIX = "rljax-"
LOCK = ".lock"
YOUNG = 60.0  # seconds in which a directory may not be locked yet by its maker
COPIES = 2  # of the weights at once: those published last, for servers that come back, and the next
SPARE = 16 << 20  # bytes for configs and tokenizers

_locks: dict[Path, int] = {}  # descriptors of the locks that this process holds, by directory

log = logging.getLogger(__name__)


def publish_parent(configured: str, workdir: Path, *, here: bool, needed: int) -> Path:
    """Returns the directory below which weights are published.

    Args:
      configured: `rollout.publish_dir`.
      workdir: the run's directory, which servers on other machines have to see.
      here: the servers are on this machine.
      needed: bytes of the weights; 0 if no room is needed.

    Raises:
      UserError: there is no such directory, or no room in it.
    """
    if configured:
        if not Path(configured).is_dir():
            raise UserError(f"{KEY}: no such directory: {configured} (make it where servers see it under the same name)")
        return _with_room(Path(configured), needed)
    if not here:
        return _with_room(workdir, needed)
    memory = memory_backed()
    if _free(memory) >= _room(needed):
        return memory
    disk = _with_room(Path(tempfile.gettempdir()), needed)
    log.warning(
        "weights are published through %s: %s has %d MB free, and they need %d MB (%s names another place)",
        disk, memory, _free(memory) >> 20, _room(needed) >> 20, KEY,
    )  # fmt: skip
    return disk


def _room(needed: int) -> int:
    return COPIES * needed + SPARE if needed else 0


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _with_room(directory: Path, needed: int) -> Path:
    if _free(directory) < _room(needed):
        raise UserError(
            f"{KEY}: {directory} has {_free(directory) >> 20} MB free, and weights on their way to servers need"
            f" {_room(needed) >> 20} MB there (name another place)"
        )
    return directory


def private_directory(parent: Path, purpose: str) -> Path:
    """Makes a directory of this process alone, and removes those that ended processes left.

    Args:
      purpose: part of the name; only directories of the same purpose are looked at.

    Raises UserError if it can't be made.
    """
    prefix = f"{PREFIX}{purpose}-"
    try:
        _remove_left(parent, prefix)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(f"{KEY}: no directory can be made in {parent}: {error.strerror} (name another place)") from None
    _locks[directory] = lock
    return directory


def remove_private(directory: Path) -> None:
    """Removes a directory that `private_directory` made. Idempotent."""
    shutil.rmtree(directory, ignore_errors=True)
    if (lock := _locks.pop(directory, None)) is not None:
        os.close(lock)


def require_private(directory: Path) -> None:
    """Makes a directory if it is missing.

    Raises UserError if it is another user's, or others can write to it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise UserError(f"{KEY}: {directory} belongs to others, or they can write to it (name another place)")


def no_room(error: Exception, directory: Path) -> UserError | None:
    """Returns the error of a full directory, if that is what a library's error is about."""
    if os.strerror(errno.ENOSPC) not in str(error):
        return None
    return UserError(f"{KEY}: {directory}: {os.strerror(errno.ENOSPC)} for the weights (make room, or name another place)")


def memory_backed() -> Path:
    """Returns a directory whose files are in memory, else the one for temporary files."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def _remove_left(parent: Path, prefix: str) -> None:
    """Removes directories of this user whose processes have ended."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours to touch
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or path in _locks:
                continue
            if not (path / LOCK).exists():
                if time.time() - found.st_mtime > YOUNG:
                    shutil.rmtree(path)
                continue
            with (path / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its process lives
                shutil.rmtree(path)
