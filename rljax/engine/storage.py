"""Where weights that are published through files lie on their way: in memory, where the system has
a directory there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path


def publish_directory(workdir: Path, suffix: str = "") -> Path:
    """Directory for the weights of one run, the same in all of its processes. Returns the path;
    does not create it.

    What a killed process of the run left there is deleted.

    Args:
      workdir: the run's own directory, which the name follows from.
      suffix: keeps apart what one run sends to several places.
    """
    name = "rljax-" + hashlib.blake2b(str(workdir.resolve()).encode(), digest_size=8).hexdigest() + suffix
    directory = memory_backed() / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def memory_backed() -> Path:
    """A directory whose files are in memory, where Linux has one; else the one for temporary
    files.
    """
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
