"""Directory for weights that are published through files; memory-backed if the system has one."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path


def publish_directory(workdir: Path, suffix: str = "") -> Path:
    """Returns the directory for one run's published weights; does not create it.

    It is the same in all processes of the run. Files that a killed process of the run left in it
    are deleted.

    Args:
      workdir: the run's own directory, which the name follows from.
      suffix: keeps apart the weights of one run for different receivers.
    """
    name = "rljax-" + hashlib.blake2b(str(workdir.resolve()).encode(), digest_size=8).hexdigest() + suffix
    directory = memory_backed() / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def memory_backed() -> Path:
    """Returns a directory whose files are in memory, else the one for temporary files."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
