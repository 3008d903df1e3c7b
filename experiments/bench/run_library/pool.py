"""Makes all runs of the library, many at once, each on cores of its own.

    models   warm-up of each that runs start from     on idle cores, beside the first runs
    runs     every recipe with every seed             --jobs at once, on cores / jobs cores each
    kept     OUT/tuning.jsonl.xz (seed 1), OUT/judging.jsonl.xz (seed 2), OUT/runs.log

A run that fails is kept like any other, since many faults end a run. After --minutes no run is
started, and those that are not done are ended and left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rljax.experiments.bench.run_library import kept
from rljax.experiments.bench.run_library.commands import environment, model_directory, sessions, warm_up
from rljax.experiments.bench.run_library.kept import KeptRun
from rljax.experiments.bench.run_library.recipe import Recipe

HALVES = {1: "tuning", 2: "judging"}  # seed -> file of its runs
GRACE = 10.0  # seconds for a process to end after SIGTERM


@dataclasses.dataclass(frozen=True)
class Job:
    """One run to make."""

    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe.name}-{self.seed}"


class Pool:
    """Cores of this machine, shared out to runs.

    Example: asyncio.run(Pool(Path("out"), Path("/tmp/runs"), jobs=32, minutes=8).make(jobs))
    """

    def __init__(self, out: Path, scratch: Path, *, jobs: int, minutes: float) -> None:
        self._out, self._scratch = out, scratch
        self._models = scratch / "models"
        self._end = time.monotonic() + 60 * minutes
        self._cores = _shares(sorted(os.sched_getaffinity(0)), jobs)
        self._lines: list[str] = []
        out.mkdir(parents=True, exist_ok=True)
        self._models.mkdir(parents=True, exist_ok=True)

    async def make(self, jobs: Sequence[Job]) -> None:
        """Makes the runs, and the models that they start from."""
        free: asyncio.Queue[Sequence[int]] = asyncio.Queue()
        for cores in self._cores:
            free.put_nowait(cores)

        async def run(job: Job, cores: Sequence[int]) -> None:
            try:
                missing = [name for name in job.recipe.models if not await models[name]]
                if missing:
                    self._say(f"{job.name}: there is no model {', '.join(missing)}")
                else:
                    await self._run(job, cores)
            finally:
                free.put_nowait(cores)

        async with asyncio.TaskGroup() as running:
            models = {
                name: running.create_task(self._warm_up(name)) for name in {name for job in jobs for name in job.recipe.models}
            }
            for job in jobs:
                cores = await free.get()
                if time.monotonic() < self._end:
                    running.create_task(run(job, cores), name=job.name)
                else:
                    self._say(f"{job.name}: not started, the time is over")
                    free.put_nowait(cores)
        for half in HALVES.values():
            path = self._out / f"{half}{kept.SUFFIX}"
            if path.is_file():
                kept.write(path, sorted(kept.read(path), key=lambda run: run.recipe))

    async def _warm_up(self, model: str) -> bool:
        """Makes a model unless it is there, on idle cores. Returns whether it is there."""
        if model_directory(self._models, model).is_dir():
            return True
        log = self._scratch / f"model-{model}.log"
        status = await self._ended(warm_up(self._models, model), [core for cores in self._cores for core in cores], log)
        self._say(f"model {model}: status {status}: {_end_of(log)}")
        return status == 0

    async def _run(self, job: Job, cores: Sequence[int]) -> None:
        workdir, log = self._scratch / job.name, self._scratch / f"{job.name}.log"
        began = time.monotonic()
        status: int | None = 0
        for command in sessions(job.recipe, job.seed, workdir, self._models):
            status = await self._ended(command, cores, log)
            if status is None:
                return self._say(f"{job.name}: ended after {time.monotonic() - began:.0f} s, the time is over")
        seconds = time.monotonic() - began
        try:
            run = KeptRun.of(job.recipe.name, job.seed, seconds, workdir, [self._scratch, self._scratch.resolve(), Path.cwd()])
            steps = len(run.files["metrics.jsonl"])
        except (OSError, ValueError, KeyError) as error:  # of one run: the others go on
            return self._say(f"{job.name}: status {status}, nothing to keep ({error}): {_end_of(log, lines=8)}")
        kept.append(self._out / f"{HALVES[job.seed]}{kept.SUFFIX}", run)
        shutil.rmtree(workdir, ignore_errors=True)
        self._say(f"{job.name}: {steps} lines of metrics in {seconds:.0f} s, status {status}: {_end_of(log)}")

    async def _ended(self, command: Sequence[str], cores: Sequence[int], log: Path) -> int | None:
        """Runs a process to its end. Returns its status; None if the time was over before."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, env=environment(len(cores)), start_new_session=True
            )
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, cores)  # before it has threads
        try:
            return await asyncio.wait_for(process.wait(), max(self._end - time.monotonic(), 0))
        except TimeoutError:
            await _end(process)
            return None
        finally:
            if process.returncode is None:
                await _end(process)

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)
        (self._out / "runs.log").write_text("".join(f"{line}\n" for line in self._lines))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends a process and those that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE)
            return


def _shares(cores: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Deals cores out, at least one to each part: with more parts than cores some share."""
    size = max(len(cores) // max(parts, 1), 1)
    return [[cores[(part * size + i) % len(cores)] for i in range(size)] for part in range(parts)]


def _end_of(log: Path, lines: int = 1) -> str:
    """Returns the last lines of a process's output, as one."""
    output = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return " | ".join(line[:200] for line in output[-lines:]) or "no output"
