"""Files of the flight recorder: adds records, and deletes those that there is no room for."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from rljax import json_lines
from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.flight.recording import FOLDER, FORMAT, KEPT, SCORES, STEP, Header, Kept, Recording
from rljax.rollout import dump
from rljax.train_step import Scored
from rljax.types import Group

log = logging.getLogger(__name__)


class RecordStore:
    """Records of the last steps, and of those that are kept, within `flight.max_mb`.

    When it is full, the oldest are deleted: ordinary records first, then kept ones without a
    checkpoint, then those with the checkpoint that was held first. The newest always stays.
    """

    def __init__(self, config: Config, workdir: Path, first_step: int) -> None:
        """Opens the folder and deletes records of steps after `first_step`. Raises OSError."""
        self._folder = workdir / FOLDER
        self._limits = config.flight
        self._folder.mkdir(parents=True, exist_ok=True)
        text = config_io.to_json(config)
        self._config = f"config-{zlib.crc32(text.encode()):08x}.json"
        (self._folder / self._config).write_text(text)
        json_lines.cut(self._folder / KEPT, first_step)
        self._recording = Recording(workdir)
        self._sizes: dict[int, int] = {}  # bytes, by step
        for step in self._recording.steps():
            self._sizes[step] = _size(self._folder / str(step))
            if step > first_step:
                self._delete(step)
        for leftover in self._folder.glob(".*.tmp"):
            shutil.rmtree(leftover)
        self._alone: set[int] = set()  # steps kept without a checkpoint
        self._with_base: dict[int, set[int]] = {}  # steps kept to be made again, by the checkpoint they need
        self._lock = threading.Lock()  # of self._with_base, which two threads change
        for kept in self._recording.kept():
            self._protect(kept, self._between(kept))

    @property
    def held(self) -> Collection[int]:
        """Steps of the checkpoints that kept steps begin from; the initial model, 0, is none."""
        with self._lock:
            return frozenset(self._with_base.keys() - {0})

    def parents(self) -> dict[int, int]:
        """Returns the parent of every recorded step."""
        return {step: header.parent for step, header in self._recording.headers().items()}

    def hold(self, base: int, limit: int) -> bool:
        """Holds a checkpoint, unless `limit` others are held. Returns whether it is held.

        The initial model, 0, is no checkpoint and always held.
        """
        with self._lock:
            if base and base not in self._with_base and len(self._with_base.keys() - {0}) >= limit:
                return False
            self._with_base.setdefault(base, set())
            return True

    def add(self, header: Header, groups: Sequence[Group]) -> None:
        """Writes a record without scores. A reader sees all of it or nothing."""
        step = header.step
        temporary, directory = self._folder / f".{step}.tmp", self._folder / str(step)
        tree = {"format": FORMAT} | dataclasses.asdict(dataclasses.replace(header, config=self._config))
        try:
            temporary.mkdir()
            if groups:
                dump.save(temporary, groups)
            (temporary / STEP).write_text(json.dumps(tree) + "\n")
            os.replace(temporary, directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._sizes[step] = _size(directory)
        self._make_room()

    def add_scores(self, step: int, scored: Scored) -> None:
        """Adds advantages, proximal log-probs, ... to a record."""
        from safetensors.numpy import save_file

        computed = {
            "advantage": scored.advantage,
            "proximal_logp": scored.proximal,
            "reference_logp": scored.reference,
            "teacher_logp": scored.teacher,
            "values": scored.values,
            "returns": scored.returns,
        }
        arrays = {name: np.concatenate(each).astype(np.float32) for name, each in computed.items() if each}
        directory = self._folder / str(step)
        temporary = directory / f".{SCORES}.tmp"
        try:
            save_file(arrays, temporary)
            os.replace(temporary, directory / SCORES)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sizes[step] = _size(directory)
        self._make_room()

    def keep(self, kept: Kept, steps: Collection[int]) -> None:
        """Keeps a step, and the steps that lead to it from its checkpoint."""
        with (self._folder / KEPT).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(kept)) + "\n")
        self._protect(kept, steps)

    def _between(self, kept: Kept) -> list[int]:
        """Returns the recorded steps from the base of a kept step up to it, this one included."""
        parents, steps, step = self.parents(), [], kept.step
        while step in parents:
            steps.append(step)
            step = parents[step] if kept.base is not None and parents[step] != kept.base else -1
        return steps

    def _protect(self, kept: Kept, steps: Collection[int]) -> None:
        if kept.base is None:
            self._alone.update(steps)
            return
        with self._lock:
            self._with_base.setdefault(kept.base, set()).update(steps)

    def _make_room(self) -> None:
        """Deletes ordinary records beyond `flight.steps`, and any beyond `flight.max_mb`."""
        newest = max(self._sizes)
        with self._lock:
            protected = self._alone.union(*self._with_base.values())
        ordinary = sorted(self._sizes.keys() - protected)
        for step in ordinary[: -self._limits.steps]:
            self._delete(step)
        candidates = [*ordinary[-self._limits.steps :], *sorted(self._alone)]
        while sum(self._sizes.values()) > self._limits.max_mb * 2**20:
            oldest = next((step for step in candidates if step in self._sizes and step != newest), None)
            if oldest is not None:
                self._delete(oldest)
            elif not self._let_go(newest):
                return

    def _let_go(self, newest: int) -> bool:
        """Gives up the steps of the checkpoint that was held first. Returns False if none is held."""
        with self._lock:
            base = next(iter(self._with_base), None)
            steps = self._with_base.pop(base) if base is not None else set()
        if base is None:
            return False
        log.warning(
            "flight.max_mb: %g MiB are too few for the steps from %d to %d, which are no longer kept",
            self._limits.max_mb, min(steps, default=base), max(steps, default=base),
        )  # fmt: skip
        for step in steps - {newest}:
            self._delete(step)
        return True

    def _delete(self, step: int) -> None:
        shutil.rmtree(self._folder / str(step), ignore_errors=True)
        self._sizes.pop(step, None)


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())
