"""Log lines on the screen: how a binary prints them, and a script that has set up no logging."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Prints to stderr, within the block, what a binary prints: warnings, and what rljax says.

    It is for a program whose logging nobody has set up. One that has a handler, on the root logger
    or on "rljax", decides itself, and a level that it gave to "rljax" is kept.
    """
    root, ours = logging.getLogger(), logging.getLogger("rljax")
    if root.handlers or ours.handlers:
        yield
        return
    # The handler of log.txt is the only one otherwise, and turns off Python's last resort for warnings
    handler = logging.StreamHandler(Stderr())
    handler.setFormatter(Plain())
    handler.addFilter(is_for_the_screen)
    level = ours.level
    root.addHandler(handler)
    if level == logging.NOTSET:
        ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(level)


def is_for_the_screen(record: logging.LogRecord) -> bool:
    """Returns False for what engines and backends say about themselves, which log.txt has as well."""
    return record.levelno >= logging.WARNING or not record.name.startswith(("rljax.engines.", "rljax.backends."))


class Stderr(io.TextIOBase):
    """Stream that writes to whatever sys.stderr is: the live view shows its lines above itself."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class Plain(logging.Formatter):
    """Formats warnings as `warning: text`, without the prefix of absl's logs."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record)
        return lines if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {lines}"
