"""Run directory, and the sink that writes its files.

config.json       resolved config of the newest step
configs/          each config that the run had, by its first step (config_record.py)
plan.json         memory and time as estimated, and as measured since (sinks/planned.py)
context.json      code, packages, hardware, model, data and evaluation of each session (context.py)
metrics.jsonl     one object per step, `step` strictly increasing; null is NaN or infinite
histograms.jsonl  histograms by step: {"step", name: {"edges": [n + 1], "counts": [n]}}
guard.jsonl       actions of the guardrails, one object each
samples.jsonl     trajectories with text, reward components, versions and advantages
groups.jsonl      whole groups of the same, one object each
eval_samples.jsonl  the same of evaluations; all files of lines go on in parts (json_lines.py)
status.json       step, version, state, process; the error of a failed run; touched while it lives
log.txt           what was said on the screen beside the steps; log.txt.1 what was before it
evaluations/      uses of the validation sets, and results of evaluations (rljax/evaluation)
checkpoints/      checkpoints to resume from
flight/           batches of the last steps (rljax/flight)
export/           Hugging Face safetensors and tokenizer, at the end
exports/          the same of steps on the way, with saver.export_freq_steps
best/             the same of the best checkpoint, with evaluator.best
workers.json      address and token for workers, while the run listens (rljax/workers/server.py)
workers/          output of the run's own workers
servers/          logs of servers that the run or its launcher started, and their token
init/             the initial model of a run with actor.init_from_scratch
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax import json_fields
from rljax.config.schema import Config, StatsLoggerConfig
from rljax.errors import UserError
from rljax.hf.tokenizer import Tokenizer
from rljax.json_lines import LineFile, misplaced, newest_step
from rljax.metrics.guardrails import Event
from rljax.metrics.histogram import Histogram
from rljax.metrics.mean import Mean, flatten, merge
from rljax.process.liveness import Identity
from rljax.sinks import RunState, Status
from rljax.sinks.config_record import ConfigRecord
from rljax.types import Group, Trajectory

log = logging.getLogger(__name__)

LINES = ("metrics", "histograms", "guard", "samples", "groups", "eval_samples")
FILES = ("config.json", "plan.json", "context.json", "status.json", "log.txt", "log.txt.1", "workers.json")
BESIDE = (".log", ".out", ".err", ".txt", ".py", ".sh", ".yaml", ".yml")  # suffixes of logs, configs and scripts
FOLDERS = (
    "configs",
    "evaluations",
    "checkpoints",
    "journal",
    "flight",
    "export",
    "exports",
    "best",
    "workers",
    "servers",
    "init",
)


class RunDirectory:
    """Run directory locked by this process.

    Raises:
      UserError: another process has locked it, it can't be written, or something else has the place
        of a file or folder of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configs: ConfigRecord | None = None  # from `begin` on
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("a+")
        except OSError as error:
            raise UserError(f"--workdir: cannot write to {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip()
            self._lock.close()
            raise UserError(f"--workdir: {path} is in use by process {owner} (wait for it, or choose another)") from None
        try:
            _check_places(path)
        except UserError as error:
            with contextlib.suppress(UserError):  # the place of status.json itself may be taken
                if self.status.is_file():
                    self.fail(str(error))
            self._lock.close()
            raise
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def init(self) -> Path:
        return self.path / "init"

    @property
    def holds_a_run(self) -> bool:
        """True if the directory has files of a run, to resume or to overwrite."""
        return any((self.path / name).exists() for name in ("metrics.jsonl", "checkpoints"))

    def begin(self, config: Config) -> None:
        """Checks a config against that of the run in the directory, and opens its record.

        A new run gets a status that names this process.

        Raises:
          UserError: the directory has a run and `recover.mode` is "fresh", or that run's config
            differs in a key that can't change.
        """
        if config.recover.mode == "fresh" and self.holds_a_run:
            raise UserError(f"--workdir: {self.path} holds a run (choose another, or recover.mode=auto to go on with it)")
        if not self.holds_a_run and (others := self._others()):
            log.warning(
                "--workdir: %s holds no run, but %s: the run is written beside that",
                self.path,
                ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else ""),
            )
        self.configs = ConfigRecord(self.path, config, self.write_text)
        if not self.status.exists():
            self.write_status(self.read_status())

    def _others(self) -> list[str]:
        """Returns the names of what is no part of a run, nor beside one by habit: logs, a config."""
        ours = {*FILES, *FOLDERS, *(f"{name}.jsonl" for name in LINES)}
        return sorted(
            path.name
            for path in self.path.iterdir()
            if path.name not in ours and not path.name.startswith(".") and path.suffix not in BESIDE
        )

    def write_text(self, name: str, text: str) -> None:
        """Writes a small file atomically: readers see the old content or the new."""
        temporary = (self.path / name).with_name(f".{Path(name).name}.tmp")
        try:
            temporary.write_text(text)
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise UserError(f"--workdir: cannot write {self.path / name}: {error.strerror}") from error

    def write_status(self, status: Status) -> None:
        process = dataclasses.asdict(Identity.of_this_process())
        self.write_text("status.json", dump(dataclasses.asdict(status) | process | {"time": time.time()}) + "\n")

    def fail(self, error: str) -> None:
        """Marks the run as failed, at the step of status.json.

        So is one that had finished, where a later command fails: what status.json says is how the
        last command ended, as its exit status does. The same config again finds it finished.
        """
        self.write_status(dataclasses.replace(self.read_status(), state=RunState.FAILED, error=error))

    def stop(self) -> None:
        """Marks a run that was running as stopped, at the step of status.json."""
        status = self.read_status()
        if status.state is RunState.RUNNING:
            self.write_status(dataclasses.replace(status, state=RunState.STOPPED))

    def read_status(self) -> Status:
        """Reads status.json. A new directory is running at step 0. Raises UserError."""
        if not self.status.exists():
            return Status(RunState.RUNNING, step=0, version=0)
        try:
            status = json_fields.read_as(Status, json_fields.read(self.status), str(self.status))  # older runs have fewer
        except UserError as error:
            raise UserError(f"--workdir: {error} (delete it to go on)") from None
        return dataclasses.replace(status, state=RunState(status.state))

    def finished_steps(self) -> int:
        """Returns the finished steps of the run, of which status.json or metrics.jsonl knows.

        Raises UserError if status.json can't be read.
        """
        return max(self.read_status().step, newest_step(self.path / "metrics.jsonl") or 0)

    def close(self) -> None:
        """Releases the lock."""
        self._lock.close()


def _check_places(directory: Path) -> None:
    """Raises UserError if a file of a run can't be written where something else is.

    Checks all at the start: some are written after all the training, and to open a fifo blocks.
    """
    wrong = [each for name in LINES for each in misplaced(directory / f"{name}.jsonl")]
    wrong += [path for name in FILES if (path := directory / name).exists() and not path.is_file()]
    for path in wrong:
        raise UserError(f"--workdir: {path} is no file, and a run writes one of that name (move it away)")
    for path in (directory / name for name in FOLDERS):
        if os.path.lexists(path) and not path.is_dir():
            raise UserError(f"--workdir: {path} is no directory, and a run makes one of that name (move it away)")


class RunDirectorySink:
    """Sink that writes metrics.jsonl, histograms.jsonl, guard.jsonl, samples.jsonl, groups.jsonl,
    eval_samples.jsonl and status.json.

    Lines of steps after `first_step` are cut first.
    """

    def __init__(self, run: RunDirectory, tokenizer: Tokenizer, *, first_step: int, logger: StatsLoggerConfig) -> None:
        self._run, self._first_step = run, first_step
        if run.configs is not None:
            run.configs.cut(first_step)
        self._tokenizer = tokenizer
        self._samples_per_step = logger.samples_per_step
        self._sampled = (first_step, 0)  # a step, and the number of its samples written

        def opened(name: str, *, bounded: bool = False, rare: bool = False) -> LineFile:
            most = logger.max_samples_mb << 20 if bounded else None
            return LineFile(run.path / name, first_step, part_bytes=logger.part_mb << 20, most_bytes=most, rare=rare)

        self._metrics = opened("metrics.jsonl")
        self._histograms = opened("histograms.jsonl")
        self._samples = opened("samples.jsonl", bounded=True)
        self._groups = opened("groups.jsonl", bounded=True, rare=True)
        self._evaluated = opened("eval_samples.jsonl", bounded=True, rare=True)
        self._guard = opened("guard.jsonl", rare=True)
        self._step, self._scalars = self._metrics.last.step, self._metrics.last.entry
        self._means: dict[str, Mean] = {}

    def write(self, step: int, metrics: Mapping[str, Mean]) -> None:
        """Appends the step's line, or merges the metrics into it if it is the last line."""
        if self._step is not None and step < self._step:
            raise ValueError(f"metrics of step {step} after those of step {self._step}")
        if step > self._first_step and self._run.configs is not None:
            self._run.configs.made(step)
        is_new = step != self._step
        if is_new:
            self._step, self._scalars, self._means = step, {}, {}
        self._means = merge([self._means, metrics])
        self._scalars |= flatten(self._means)
        line = dump({"step": step} | self._scalars)
        if is_new:
            self._metrics.append(step, line)
        else:
            self._metrics.replace(line)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Appends the step's line."""
        entry = {"step": step} | {name: h.to_json() for name, h in histograms.items()}
        self._histograms.append(step, dump(entry))

    def sample(self, step: int, uid: str, trajectory: Trajectory, advantage: np.ndarray) -> None:
        at, count = self._sampled
        count = count if at == step else 0
        if count >= self._samples_per_step:
            return
        self._sampled = (step, count + 1)
        tokens = describe_tokens(trajectory, advantage, self._tokenizer)
        entry = {"step": step, "uid": uid} | describe(trajectory, self._tokenizer) | tokens
        self._samples.append(step, dump(entry))

    def group(self, step: int, group: Group, advantages: Sequence[np.ndarray]) -> None:
        """Appends the group's line: its trajectories as in samples.jsonl, the prompt once."""
        entries = [
            describe(t, self._tokenizer) | {"advantages": describe_advantages(t, advantage)}
            for t, advantage in zip(group.trajectories, advantages, strict=True)
        ]
        prompts = [entry.pop("prompt") for entry in entries]
        entry = {"step": step, "uid": group.uid, "prompt": prompts[0], "trajectories": entries}
        self._groups.append(step, dump(entry))

    def evaluated(self, step: int, name: str, uid: str, trajectory: Trajectory) -> None:
        """Appends the trajectory's line."""
        entry = {"step": step, "set": name, "uid": uid} | describe(trajectory, self._tokenizer)
        self._evaluated.append(step, dump(entry))

    def event(self, event: Event) -> None:
        """Appends the event's line."""
        self._guard.append(event.step, dump(dataclasses.asdict(event)))

    def status(self, status: Status) -> None:
        self._run.write_status(status)

    def close(self) -> None:
        for file in (self._metrics, self._histograms, self._samples, self._groups, self._evaluated, self._guard):
            file.close()


def describe(trajectory: Trajectory, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a trajectory as one object of samples.jsonl.

    `versions` is a list of [version, number of tokens], run-length encoded, from the first sampled
    token on.
    """
    start = _first_sampled(trajectory)
    return {
        "prompt": tokenizer.decode(trajectory.token_ids[:start].tolist(), skip_special_tokens=False),
        "completion": tokenizer.decode(trajectory.token_ids[start:].tolist(), skip_special_tokens=False),
        "tokens": len(trajectory),
        "trained_tokens": int(trajectory.loss_mask.sum()),
        "reward": trajectory.reward,
        "components": dict(trajectory.components),
        "versions": _run_lengths(trajectory.versions[start:].tolist()),
        "finish": str(trajectory.finish),
    } | ({} if trajectory.episode is None else {"episode": trajectory.episode})


def describe_tokens(trajectory: Trajectory, advantage: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns more keys of a trajectory's object in samples.jsonl, from the first sampled token on.

    `pieces` has the text of each token, and `advantages` is run-length encoded as `versions` is;
    the advantage of a token that is not trained on is null.
    """
    start = _first_sampled(trajectory)
    pieces = tokenizer.pieces(trajectory.token_ids[start:].tolist())
    return {"pieces": pieces, "advantages": describe_advantages(trajectory, advantage)}


def describe_advantages(trajectory: Trajectory, advantage: np.ndarray) -> list[list[Any]]:
    """Returns advantages from the first sampled token on, run-length encoded; null if untrained."""
    start = _first_sampled(trajectory)
    trained = zip(advantage[start:].tolist(), trajectory.loss_mask[start:].tolist(), strict=True)
    return _run_lengths([float(f"{value:.6g}") if used else None for value, used in trained])


def _first_sampled(trajectory: Trajectory) -> int:
    """Returns the index of the first sampled token; the length if there is none."""
    sampled = np.flatnonzero(trajectory.versions >= 0)
    return int(sampled[0]) if sampled.size else len(trajectory)


def _run_lengths(values: Sequence[Any]) -> list[list[Any]]:
    return [[value, sum(1 for _ in run)] for value, run in itertools.groupby(values)]


def dump(value: Any) -> str:
    """Encodes a value as one line of JSON. NaN and infinities become null."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, default=_plain)
    except ValueError:  # one of them is there; looking for it first would take most of the time
        return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
