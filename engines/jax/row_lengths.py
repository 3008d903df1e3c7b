"""Lengths that rows are padded to, so that few programs are compiled."""

from __future__ import annotations

SHORTEST = 32  # tokens; shorter rows are padded to it


def padded(length: int, per_octave: int) -> int:
    """Least of 32, 48, 64, 96, 128, ... that holds a row of so many tokens.

    Args:
      per_octave: lengths between a power of two and the next, two in this example.
    """
    size = SHORTEST
    while 2 * size < length:
        size *= 2
    step = size // per_octave
    return size + max(-(-(length - size) // step), 0) * step
