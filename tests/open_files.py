"""A fixture for rooms that write files: a test that leaves one open fails."""

import gc
import os
import tempfile
from pathlib import Path

import pytest

OPEN = Path("/proc/self/fd")  # Linux


def open_files() -> dict[str, str]:
    """Returns the files below the temporary directory that this process has open, by descriptor."""
    found = {}
    for descriptor in os.listdir(OPEN) if OPEN.is_dir() else ():
        try:
            found[descriptor] = os.readlink(OPEN / descriptor)
        except OSError:  # that of the listing itself
            continue
    return {descriptor: path for descriptor, path in found.items() if path.startswith(tempfile.gettempdir() + os.sep)}


@pytest.fixture(autouse=True)
def no_file_stays_open():
    before = open_files()
    yield
    if open_files().items() <= before.items():
        return
    gc.collect()  # what only garbage still has open is closed by its owner's end, and told by a ResourceWarning
    left = sorted(open_files().items() - before.items())
    assert not left, f"left open: {', '.join(path for _, path in left)}"
