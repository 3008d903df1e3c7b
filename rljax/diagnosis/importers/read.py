"""Reads a log of another trainer into a History."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rljax.config.registry import nearest
from rljax.diagnosis.history import REWARD, History
from rljax.diagnosis.importers import formats, tables
from rljax.errors import UserError

AUTO = "auto"


def read(path: Path, form: str = AUTO, source: str = AUTO) -> History:
    """Reads a log.

    Args:
      form: one of FORMATS; "auto" goes by the file's name.
      source: one of SOURCES; "auto" takes the one that knows most of the names.

    Raises:
      UserError: the file can't be read, or has no metric that rules know.
    """
    if not path.exists():
        raise UserError(f"--log: no such file: {path}")
    form = formats.detect(path) if form == AUTO else form
    if form not in formats.FORMATS:
        raise UserError(f"--format: no such format: {form!r} ({nearest(form, [AUTO, *formats.FORMATS])})")
    if path.is_dir() and form not in formats.OF_DIRECTORIES:
        raise UserError(f"--log: {path} is a directory, and --format={form} reads a file (name the file in it)")
    rows = formats.FORMATS[form](path)
    seen = {name for row in rows for name in row if name != "step"}
    chosen = tables.detect(seen) if source == AUTO else source
    if chosen is None:
        raise UserError(
            f"--log: {path} has no metric that rules know ({', '.join(sorted(seen)[:5])}, ...); --source names the trainer"
        )
    if chosen not in tables.SOURCES:
        raise UserError(f"--source: no such trainer: {chosen!r} ({nearest(chosen, [AUTO, *tables.SOURCES])})")
    known = tables.SOURCES[chosen]
    history = History.of_rows(tables.convert(known, rows), source=_what_was_read(path))
    if not history[REWARD]:
        raise UserError(
            f"--log: {path} has no reward under a name of {chosen} (docs/doctor.md has the names; --source names another)"
        )
    return dataclasses.replace(history, trainer=chosen, theirs=known.names_of_ours(seen))


def _what_was_read(path: Path) -> str:
    """Names the files of a log: of a directory, the event files of the run in it."""
    if not path.is_dir():
        return str(path)
    first, *others = formats.event_files(path)
    return f"{first}" + (f" and {len(others)} more event files of the same directory" if others else "")
