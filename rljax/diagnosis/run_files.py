"""Reads the files of a run directory.

A live run's last line may be torn, and files may be missing or of an older version: what can be
read is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax import json_lines
from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.errors import UserError

MOST_STEPS = 2**53  # what a float64, and so any JSON reader, counts to


class Bins(NamedTuple):
    """Histogram of one metric at one step."""

    edges: np.ndarray  # [n + 1] float64, increasing
    counts: np.ndarray  # [n] float64


class Columns(NamedTuple):
    """Metrics by name over all steps."""

    steps: np.ndarray  # [N] int64, strictly increasing
    series: dict[str, np.ndarray]  # name -> [N] float64, NaN where a step has no finite value
    not_finite: dict[str, np.ndarray]  # name -> steps at which it was NaN or infinite


def columns(rows: Iterable[Mapping[str, Any]]) -> Columns:
    """Turns objects with a `step` and metrics by name into columns; null is NaN or infinite.

    Objects of the same step are merged and the last value wins, as of steps written again after a
    resume.
    """
    merged: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        step = int(row["step"])
        merged[step] = {**merged[step], **row} if step in merged else row  # a copy of each would double their size
    steps = np.array(sorted(merged), np.int64)
    series: dict[str, np.ndarray] = {}
    not_finite: dict[str, list[int]] = {}
    for at, step in enumerate(steps.tolist()):
        for name, value in merged[step].items():
            if name == "step" or isinstance(value, str | bool | list | dict):
                continue
            if name not in series:
                series[name] = np.full(len(steps), np.nan)
            number = number_of(value)
            if math.isfinite(number):
                series[name][at] = number
            else:
                not_finite.setdefault(name, []).append(step)
    return Columns(steps, series, {name: np.array(at, np.int64) for name, at in not_finite.items()})


def number_of(value: float | None) -> float:
    """Returns a value as float64; NaN for null, infinity for an integer beyond all floats."""
    try:
        return np.nan if value is None else float(value)
    except OverflowError:
        return np.inf


class Lines(NamedTuple):
    """Content of a JSON lines file."""

    rows: list[dict[str, Any]]  # objects with a `step`
    damaged: dict[str, list[int]]  # numbers, from 1, of lines that are none, by the name of the part that has them


def read_lines(path: Path) -> Lines:
    """Reads a JSON lines file, all its parts; one that is missing has no lines.

    The last line of all may be half written, and is not called damaged.
    """
    rows: list[dict[str, Any]] = []
    damaged: dict[str, list[int]] = {}
    for part in json_lines.parts(path):
        last = 0
        try:
            with part.open("rb") as file:  # line by line: a long run has hundreds of megabytes
                for last, line in enumerate(file, 1):
                    entry = _object(line.decode(errors="replace"))
                    if _has_step(entry):
                        rows.append(entry)
                    else:
                        damaged.setdefault(part.name, []).append(last)
        except OSError:
            continue
        if part == path and damaged.get(part.name, [0])[-1] == last > 0:
            damaged[part.name].pop()
    return Lines(rows, {name: numbers for name, numbers in damaged.items() if numbers})


def read_ends(path: Path, most: int) -> Lines:
    """Reads the first and the last lines of a JSON lines file, of `most` bytes together.

    Reads all of a smaller one. Damaged lines are left out and not told.
    """
    entries = [_object(line.decode(errors="replace")) for line in json_lines.ends(path, most)]
    return Lines([entry for entry in entries if _has_step(entry)], {})


class Tail:
    """Lines that were added to a JSON lines file since the last look.

    Example:

        tail = Tail(workdir / "samples.jsonl")
        tail.read()
    """

    def __init__(self, path: Path) -> None:
        """Begins at the present end of the file."""
        self._path = path
        self._part, self._at = _inode(path), path.stat().st_size if path.is_file() else 0

    def read(self) -> list[dict[str, Any]]:
        """Returns the objects with a `step` of the whole lines since the last call."""
        found: list[dict[str, Any]] = []
        for part in self._unread():
            inode = _inode(part)
            if inode != self._part:
                self._part, self._at = inode, 0
            try:
                with part.open("rb") as file:
                    file.seek(self._at)
                    whole, newline, _ = file.read().rpartition(b"\n")
            except OSError:
                break
            self._at += len(whole + newline)
            found += [_object(line) for line in lines_of(whole.decode(errors="replace"))]
        return [each for each in found if _has_step(each)]

    def _unread(self) -> list[Path]:
        """Returns the part that was read last and those after it; the newest if it is gone."""
        found = json_lines.parts(self._path)
        at = next((n for n, part in enumerate(found) if _inode(part) == self._part), len(found) - 1)
        return found[max(at, 0) :]


def _inode(path: Path) -> int:
    """Returns what a file keeps when it is renamed; 0 if there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def lines_of(text: str) -> list[str]:
    """Returns the lines of a JSON lines file, which only a newline ends.

    str.splitlines() also ends them at U+2028 or U+0085, which stand in completions as they are.
    """
    return text.removesuffix("\n").split("\n") if text else []


def _has_step(entry: Mapping[str, Any]) -> bool:
    step = entry.get("step")
    return isinstance(step, int) and not isinstance(step, bool) and abs(step) <= MOST_STEPS


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads a JSON file that holds an object; None if it is missing or can't be read."""
    try:
        return _object(path.read_text(encoding="utf-8", errors="replace")) or None
    except OSError:
        return None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # the latter of thousands of brackets
        return {}
    return value if isinstance(value, dict) else {}


def read_config(path: Path) -> Config | None:
    """Reads config.json; keys that another version of rljax had or lacked have their defaults."""
    tree = read_object(path)
    if tree is None:
        return None
    known = _known(config_io.to_dict(Config()), tree)
    engines = {name: value for name, value in tree.items() if name not in known}
    for candidate in (tree, known | engines, known):  # sections of engines that are not installed can't be read
        try:
            return config_io.from_dict(candidate)
        except UserError:
            continue
    return None


def config_of(workdir: Path) -> Config:
    """Reads the config of a run, as `read_config` does. Raises UserError without one."""
    config = read_config(workdir / "config.json")
    if config is None:
        raise UserError(f"--workdir: no config.json of a run in {workdir} (the directory of a run that rljax train made)")
    return config


def _known(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    known = {}
    for name, default in defaults.items():
        value = given.get(name, default)
        known[name] = _known(default, value) if isinstance(default, dict) and default and isinstance(value, dict) else value
    return known


def histograms(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, Bins]]:
    """Returns the histograms of the lines of histograms.jsonl: name -> step -> histogram."""
    found: dict[str, dict[int, Bins]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, dict) and (bins := _bins(value)) is not None:
                found.setdefault(name, {})[row["step"]] = bins
    return found


def _bins(value: Mapping[str, Any]) -> Bins | None:
    """Reads a histogram; None for what is none."""
    try:
        bins = Bins(np.array(value["edges"], np.float64), np.array(value["counts"], np.float64))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    shaped = bins.edges.ndim == bins.counts.ndim == 1 and len(bins.edges) == len(bins.counts) + 1 > 1
    whole = shaped and np.isfinite(bins.edges).all() and np.isfinite(bins.counts).all() and (np.diff(bins.edges) > 0).all()
    return bins if whole else None
