"""Long stages of a start: what is being done is said once it takes long."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from rljax.process.signals import require_no_stop

SECONDS = 8.0  # that a stage takes before it is said: a command that is silent for 10 looks hung

log = logging.getLogger(__name__)


@contextlib.contextmanager
def stage(what: str) -> Iterator[None]:
    """Says what the block does, in one line, if it takes longer than SECONDS.

    Raises `Stopped` before and after it, if a stop was asked for and got lost.

    Example:

        with stage("loading the model"):
            ...  # "loading the model ..."
    """
    require_no_stop()
    timer = threading.Timer(SECONDS, log.info, ("%s ...", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    require_no_stop()
