"""The record of a run that ends: its status, and a log of what was said."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rljax.errors import IncompleteRun, UserError
from rljax.experiments.error_lines import reason_of
from rljax.process.signals import last_words

if TYPE_CHECKING:
    from rljax.sinks.run_directory import RunDirectory


@contextlib.contextmanager
def recorded(run: RunDirectory, max_log_mb: int) -> Iterator[None]:
    """Records an error that ends the run in status.json, in one line, and raises it again.

    What is said on the screen until then is in log.txt too. Meanwhile status.json is touched, so
    that a process that was killed is told from one that lives.

    Args:
      max_log_mb: size of log.txt and log.txt.1, the part before it, together.
    """
    from rljax.process.liveness import beating

    handler = _log_to(run.path / "log.txt", max_log_mb << 19)
    told = contextlib.ExitStack()
    told.enter_context(last_words(functools.partial(_stopped, run, handler)))
    try:
        with beating(run.status):
            yield
    except KeyboardInterrupt as error:  # before the first step or after the last one, or a second signal
        _stopped(run, handler, str(error) or "interrupted")
        raise
    except IncompleteRun as error:  # status.json says so already
        _write(handler, reason_of(error))
        raise
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (0, None):
            reason = reason_of(error)
            with contextlib.suppress(UserError):  # the disk itself may have failed; raise the first error
                run.fail(" ".join(reason.split()))
            _write(handler, reason)
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        told.close()
        handler.close()
        run.close()


def _stopped(run: RunDirectory, handler: logging.Handler, line: str) -> None:
    """Records that a signal has ended a run."""
    with contextlib.suppress(UserError):
        run.stop()
    _write(handler, line)


def _write(handler: logging.Handler, line: str) -> None:
    """Writes an error that the screen shows in its own way to the log of the run alone."""
    handler.handle(logging.makeLogRecord({"levelno": logging.ERROR, "levelname": "ERROR", "msg": line}))


def _log_to(path: Path, part_bytes: int) -> logging.Handler:
    """Appends what is logged from now on to a file. Raises UserError if it can't be written."""
    from logging.handlers import RotatingFileHandler

    try:
        handler = RotatingFileHandler(path, maxBytes=part_bytes, backupCount=1, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--workdir: cannot write {path}: {error.strerror}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    return handler
