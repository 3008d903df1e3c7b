"""Formats of logs: each is read into rows of a step and metrics by name."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rljax.diagnosis import run_files
from rljax.errors import UserError

Row = dict[str, Any]

# Names of a column that counts steps, the first that is there
STEP_NAMES = (
    *("step", "train/global_step", "training/global_step", "trainer/global_step", "global_step"),
    *("Step", "_step", "training_step", "iteration"),
)
RUN_SEPARATOR = " - "  # "<run> - <metric>" in the export of a W&B panel
SMOOTHING = ("__MIN", "__MAX")  # ends of columns that such an export adds
EVENTS = "events.out.tfevents"
FRAME = 8 + 4 + 4  # bytes of a record of an event file beside its event: a length and two checksums


def read_wandb_csv(path: Path) -> list[Row]:
    """Reads a CSV that W&B exports: of a panel, or a run's whole history."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, None)
            table = list(reader)
        except csv.Error as error:  # a cell longer than any number
            raise UserError(f"--log: {path}:{reader.line_num}: not a table of numbers ({error})") from None
    if not header:
        raise UserError(f"--log: {path} is empty")
    names = [name.rpartition(RUN_SEPARATOR)[2].strip() for name in header]
    _refuse_several_runs(path, header)
    kept = [(i, name) for i, name in enumerate(names) if not name.endswith(SMOOTHING)]
    rows = [{name: _number(cells[i]) for i, name in kept if i < len(cells)} for cells in table]
    return _with_steps(path, ({name: value for name, value in row.items() if value is not None} for row in rows), names)


def _refuse_several_runs(path: Path, header: Iterable[str]) -> None:
    runs = {name.rpartition(RUN_SEPARATOR)[0] for name in header if RUN_SEPARATOR in name}
    if len(runs) > 1:
        raise UserError(f"--log: {path} has {len(runs)} runs ({', '.join(sorted(runs)[:3])}); export one run")


def _number(cell: str) -> float | None:
    """Returns the number in a cell; NaN for one that is not finite, None for an empty cell or text."""
    if cell.strip().lower() in ("nan", "inf", "infinity", "-inf", "-infinity"):
        return math.nan
    try:
        return float(cell)
    except ValueError:
        return None


def read_json_lines(path: Path) -> list[Row]:
    """Reads objects, one per line or in one list; or the `log_history` of a trainer_state.json.

    An object may hold its metrics itself or, as those of verl's file logger, under `data`.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    history = _log_history(text)
    if history is not None:
        return _with_steps(path, history)
    rows: list[Row] = []
    lines = run_files.lines_of(text)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break  # the last line of a live run may be half written
            raise UserError(f"--log: {path}:{number}: not JSON (--format=wandb-csv or tensorboard for others)") from None
        if isinstance(row, dict):
            rows.append(_unpacked(row))
    return _with_steps(path, rows)


def _unpacked(row: Row) -> Row:
    data = row.get("data")
    return data | {name: value for name, value in row.items() if name != "data"} if isinstance(data, dict) else row


def _log_history(text: str) -> list[Row] | None:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return None
    history = whole.get("log_history") if isinstance(whole, dict) else whole
    return [_unpacked(row) for row in history if isinstance(row, dict)] if isinstance(history, list) else None


def read_tensorboard(path: Path) -> list[Row]:
    """Reads the scalars of an event file, or of a directory with the event files of one run."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise UserError("--format=tensorboard: not installed (pip install 'rljax[tensorboard]>=0.1')") from None
    files = event_files(path)
    for file in files:
        _refuse_damaged(file)
    events = EventAccumulator(str(files[0].parent if path.is_dir() else path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    rows: dict[int, Row] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {"step": event.step})[tag] = event.value
    if not rows:
        raise UserError(f"--log: {path} has no scalars")
    return [rows[step] for step in sorted(rows)]


def _refuse_damaged(file: Path) -> None:
    """Raises UserError for a record that can't be read and is not the last one.

    TensorBoard stops there without a word.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    size = file.stat().st_size  # first, as the run may be live
    read = sum(len(event) + FRAME for event in RawEventFileLoader(str(file)).Load())
    with file.open("rb") as records:
        records.seek(read)
        end = read + int.from_bytes(records.read(8), "little") + FRAME  # of the first record that was not read
        if end >= size:
            return
        records.seek(end)
        behind = records.read(size - end)
    if behind.strip(b"\0"):  # a power cut leaves zeros behind a half written record
        raise UserError(f"--log: {file} is damaged at byte {read}, and what follows can't be read")


def event_files(path: Path) -> list[Path]:
    """Returns the event files of a path: itself, or those of the one run in a directory.

    TensorBoard takes each directory with event files for a run of its own.

    Raises:
      UserError: a directory has no event files, or those of several runs below it.
    """
    if not path.is_dir():
        return [path]
    if files := sorted(path.glob(f"*{EVENTS}*")):
        return files
    runs = sorted({file.parent for file in path.rglob(f"*{EVENTS}*")})
    if not runs:
        raise UserError(f"--log: {path} has no event files (names with {EVENTS})")
    if len(runs) > 1:
        first = ", ".join(str(run.relative_to(path)) for run in runs[:3])
        more = ", ..." if len(runs) > 3 else ""
        raise UserError(f"--log: {path} has event files of {len(runs)} runs ({first}{more}); name one of their directories")
    return sorted(runs[0].glob(f"*{EVENTS}*"))


def _with_steps(path: Path, rows: Iterable[Mapping[str, Any]], header: Iterable[str] = ()) -> list[Row]:
    """Names the column that counts steps `step`. Raises UserError if there is none.

    Args:
      header: names of columns that rows may lack, as their cells hold no numbers.
    """
    rows = list(rows)
    if not rows:
        raise UserError(f"--log: {path} has no line of metrics")
    name = next((name for name in STEP_NAMES if any(_is_step(row.get(name)) for row in rows)), None)
    if name is None:
        seen = list(dict.fromkeys([*header, *(name for row in rows for name in row)]))
        if named := next((name for name in STEP_NAMES if name in seen), None):
            raise UserError(f"--log: {path}: its column {named!r} has no number of a step")
        there = f"; it has {', '.join(map(repr, seen[:3]))}{', ...' if len(seen) > 3 else ''}" if seen else ""
        raise UserError(f"--log: {path} has no column of steps (one of {', '.join(STEP_NAMES)}{there})")
    return list(_renamed(rows, name))


def _is_step(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= run_files.MOST_STEPS


def _renamed(rows: Iterable[Mapping[str, Any]], step: str) -> Iterator[Row]:
    for row in rows:
        if _is_step(row.get(step)):
            yield {name: value for name, value in row.items() if name != step} | {"step": int(row[step])}


OF_DIRECTORIES = ("tensorboard",)
FORMATS: Mapping[str, Callable[[Path], list[Row]]] = {
    "wandb-csv": read_wandb_csv,
    "tensorboard": read_tensorboard,
    "jsonl": read_json_lines,
}


def detect(path: Path) -> str:
    """Returns the format of a log by its name."""
    if path.is_dir() or EVENTS in path.name:
        return "tensorboard"
    return "wandb-csv" if path.suffix == ".csv" else "jsonl"
