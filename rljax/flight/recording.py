"""Reads what the flight recorder of a run wrote: records, and which steps can be made again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax import json_fields, json_lines
from rljax.checkpoints.store import Checkpoints
from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.rollout import dump
from rljax.types import Group

FOLDER = "flight"
FORMAT = "rljax-step-1"
STEP, SCORES, KEPT = "step.json", "scores.safetensors", "kept.jsonl"

Arrays = list[np.ndarray]  # one [T] array per trajectory


@dataclasses.dataclass(frozen=True)
class Header:
    """step.json of a record: where the step stands among the others.

    Example: Header(step=913, version=12, parent=912, lr_factor=1.0, config="config-5f3a91c2.json")
    """

    step: int
    version: int | None  # training steps finished before it; None of a rollback, which has no batch
    parent: int  # step whose learner it began with
    lr_factor: float  # of the learning rates, as guardrails had scaled them
    config: str = ""  # name of the file with its config


@dataclasses.dataclass(frozen=True)
class Kept:
    """A step at which a guard or a rule spoke.

    Example: Kept(step=57, why="guard.max_grad_norm: ...", base=50)
    """

    step: int
    why: str
    base: int | None  # checkpoint that is kept with it, 0 for the initial model; None: only its batch is kept


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """Everything that a step was made of, apart from the learner's state."""

    header: Header
    config: Config
    groups: list[Group]
    scores: Mapping[str, Arrays]  # by the names of `Batch`, as advantage; empty if the step ended before there were any


@dataclasses.dataclass(frozen=True)
class Chain:
    """Steps to make one after the other, and the checkpoint to begin with.

    Example: Chain(base=50, steps=(51, 52, 53))
    """

    base: int  # step of a checkpoint; 0: the initial model
    steps: tuple[int, ...]


class Recording:
    """Records and checkpoints of a run directory, for reading. Also of a run that goes on.

    Example:

        recording = Recording(Path("runs/quickstart"))
        record = recording.read(913)
        chain = next(recording.chains(912))     # how to get the learner that step 913 began with
    """

    def __init__(self, workdir: Path) -> None:
        """Raises UserError if the directory has no flight recorder's files."""
        self.workdir = workdir
        self.folder = workdir / FOLDER
        if not self.folder.is_dir():
            raise UserError(f"--workdir: {workdir} has no {FOLDER}/ (a run writes it unless flight.steps is 0)")
        self._checkpoints = Checkpoints(workdir / "checkpoints", keep_last=1)

    def steps(self) -> list[int]:
        """Returns the recorded steps, ascending."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def headers(self) -> dict[int, Header]:
        """Returns the headers of all records, by step. Records that can't be read are left out."""
        found = {}
        for step in self.steps():
            with contextlib.suppress(OSError, UserError):  # torn, or just being deleted
                found[step] = self._header(step)
        return found

    def header(self, step: int) -> Header:
        """Reads a step's header.

        Raises:
          UserError: the step isn't recorded.
        """
        try:
            return self._header(step)
        except FileNotFoundError:
            raise UserError(f"--step: {step} is not recorded in {self.folder} ({self._able()})") from None

    def _header(self, step: int) -> Header:
        path = self.folder / str(step) / STEP
        tree = json_fields.read_object(path, {})
        if tree.get("format") != FORMAT:
            raise UserError(f"{path}: not of format {FORMAT}")
        return json_fields.read_as(Header, tree, str(path))

    def config(self, header: Header) -> Config:
        """Reads the config that a step was made with; keys of later releases have their defaults.

        Raises:
          UserError: it has keys that this release has not.
        """
        path = self.folder / header.config
        try:
            return config_io.from_json(path.read_text(), fill=True)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        except UserError as error:
            raise UserError(f"{path}: {error}; use the release that recorded it") from None
        except ValueError as error:  # of a name that can't be one
            raise UserError(f"{self.folder / str(header.step) / STEP}: config: {error}") from None

    def read(self, step: int) -> StepRecord:
        """Reads the record of a step. Raises UserError if there is none, or it is damaged."""
        header = self.header(step)
        if header.version is None:
            raise UserError(f"--step: {step} is a rollback to the learner after step {header.parent}: it trained on nothing")
        directory = self.folder / str(step)
        groups = dump.load(directory)
        return StepRecord(header, self.config(header), groups, read_scores(directory, groups))

    def kept(self) -> list[Kept]:
        """Returns the steps at which a guard or a rule spoke, in the order of their writing."""
        path = self.folder / KEPT
        return [json_fields.read_as(Kept, entry, str(path)) for entry in json_lines.entries(path)]

    def metrics(self, step: int) -> dict[str, float]:
        """Returns a step's line of metrics.jsonl, without `step`; null is NaN. Empty without one."""
        for entry in json_lines.entries(self.workdir / "metrics.jsonl"):
            if entry.pop("step") == step:
                return {name: float("nan") if value is None else value for name, value in entry.items()}
        return {}

    # Making steps again

    def chains(self, step: int) -> Iterator[Chain]:
        """Yields the ways to the learner's state after a step, the shortest first."""
        return self._chains(step, self.headers())

    def _chains(self, step: int, headers: Mapping[int, Header]) -> Iterator[Chain]:
        checkpoints = {0, *self._checkpoints.steps()}
        steps: list[int] = []
        while True:
            if step in checkpoints:
                yield Chain(step, tuple(reversed(steps)))
            if step not in headers:
                return
            if headers[step].version is not None:
                steps.append(step)
            step = headers[step].parent

    def checkpoints(self) -> list[int]:
        """Returns the steps of the checkpoints that exist, ascending."""
        return self._checkpoints.steps()

    def checkpoint(self, step: int) -> Path:
        """Returns the learner's directory in a checkpoint."""
        return self.workdir / "checkpoints" / str(step) / "learner"

    def step_of_version(self, version: int) -> int | None:
        """Returns the step after which the learner had a version's weights; None if it is unknown."""
        return next((header.parent for header in self.headers().values() if header.version == version), None)

    def remakeable(self) -> list[int]:
        """Returns the steps that can be made again, ascending."""
        headers = self.headers()
        trained = [header for header in headers.values() if header.version is not None]
        return [header.step for header in trained if next(self._chains(header.parent, headers), None) is not None]

    def newest(self) -> int:
        """Returns the newest step that can be made again. Raises UserError if none can."""
        able = self.remakeable()
        if not able:
            raise UserError(f"--workdir: no step of {self.folder} can be made again (no checkpoint has all batches after it)")
        return able[-1]

    def cannot_reach(self, step: int) -> UserError:
        """Makes the error for a state that no checkpoint leads to."""
        return UserError(f"--step: no checkpoint up to step {step} has all batches from there on ({self._able()})")

    def _able(self) -> str:
        able = spans(self.remakeable())
        return f"steps that can be made again: {able}" if able else "no step can be made again"


def read_scores(directory: Path, groups: Sequence[Group]) -> dict[str, Arrays]:
    """Reads what was computed from a batch before its first update; empty if there is nothing."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = directory / SCORES
    if not path.exists():
        return {}
    ends = np.cumsum([len(t) for group in groups for t in group.trajectories])
    try:
        arrays: dict[str, Any] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: can't be read: {' '.join(str(error).split())}") from None
    return {name: np.split(array, ends[:-1]) for name, array in arrays.items()}


def spans(steps: Sequence[int]) -> str:
    """Writes ascending numbers as spans: [3, 4, 5, 9] -> "3-5, 9"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
