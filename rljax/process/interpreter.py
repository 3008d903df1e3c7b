"""Settings of the Python interpreter for a process in which many episodes run beside a device."""

from __future__ import annotations

import gc
import sys

YOUNG_OBJECTS = 20_000  # new objects before the garbage collector looks at them; 700 by default, of which an episode makes 50
SWITCH_INTERVAL = 0.001  # seconds after which a thread gives way to one that waits; 0.005 by default


def collect_less_often() -> None:
    """Has the garbage collector look at new objects less often.

    Call it first of all: modules that are imported and programs that are traced stay, and going
    through them a thousand times takes half a second of a start.
    """
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def settle() -> None:
    """Exempts what exists now from garbage collection, and lets threads take turns more often.

    Call it once everything is made that lives as long as the process, before the loop. Otherwise
    the collector goes through all modules, models and compiled programs again and again: a fifth of
    what the host does in a step of hundreds of short episodes. A sampler's thread that waits for
    the event loop's keeps its device waiting.
    """
    gc.freeze()
    collect_less_often()
    sys.setswitchinterval(SWITCH_INTERVAL)
