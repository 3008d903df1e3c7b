"""Memory of this process."""

from __future__ import annotations

import os
from pathlib import Path

STATM = Path("/proc/self/statm")  # sizes in pages: the second is the resident set


def resident_bytes() -> int | None:
    """Returns the memory that this process has in RAM now; None where the system doesn't tell."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
