"""Standard streams of a process that was started without some (`>&-`, a daemon)."""

from __future__ import annotations

import os
import sys


def open_closed() -> None:
    """Opens the null device for those of stdin, stdout and stderr that are closed.

    The next file that is opened would get the descriptor otherwise, and what is meant for the
    screen would be written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free: this one
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)
