"""CPU seconds from the start of a run to its first step of RL, beside another checkout.

python -m experiments.bench.start --config=quickstart --config.warmup.steps=2 --peer=../other

In turns, both checkouts run `python -m experiments.train` in their own folder, with their own
config file of that name, until metrics.jsonl has the line of the first step behind the warm-up.
Then they are killed. Seconds are user and system, of the process and all that it started, ended
ones included.
Nothing is remembered from run to run: there is no cache of compiled programs, and none of the data.
Beside the whole stand the seconds at which the run says its model, when what goes in has been
read and checked, and its devices, when its engines are made, and at its first line of metrics.
Which of a pair runs first alternates. The ratio is this checkout's seconds over the peer's.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import flags

import rljax
from rljax.errors import UserError
from rljax.experiments import main

PEER = flags.DEFINE_string("peer", "", "Folder of another checkout; empty: only this one.")
PAIRS = flags.DEFINE_integer("pairs", 3, "Runs of each checkout.", lower_bound=1)
INTERVAL = 0.02  # seconds between two looks at a run
SAID = ("model: ", "devices: ")  # lines that a run says, by what they begin with
FIRST = "first line"  # of metrics.jsonl
HEADER = "| checkout | run | load | to its model | to its devices | to its first line | to the step | wall s |"


@dataclasses.dataclass(frozen=True)
class Started:
    """One run, up to its step."""

    cpu: Mapping[str, float]  # seconds by what was reached; "" is the step
    wall: float
    load: float  # average of the machine over a minute, when it began

    def row(self, name: str, number: int | str) -> str:
        reached = " | ".join(f"{self.cpu[mark]:.1f}" if mark in self.cpu else "" for mark in (*SAID, FIRST, ""))
        return f"| {name} | {number} | {self.load:.1f} | {reached} | {self.wall:.1f} |"


def bench() -> None:
    config = main.config_from_flags()
    steps = 1 if config.actor.loss == "sft" else config.warmup.steps + 1
    checkouts = {"this": Path(rljax.__file__).resolve().parents[1]} | ({"peer": Path(PEER.value)} if PEER.value else {})
    for folder in checkouts.values():
        if not (folder / "experiments" / "train.py").is_file():
            raise UserError(f"--peer: no checkout of rljax: {folder} (the folder with experiments/train.py)")
    arguments = [f"--config={main.FLAGS.config}"]
    arguments += [f"--config.{key}" + ("" if value is None else f"={value}") for key, value in main.overrides_from_flags()]
    print(f"CPU s of `experiments.train {' '.join(arguments)}` to step {steps}\n\n{HEADER}\n|{' --- |' * 8}", flush=True)
    runs: dict[str, list[Started]] = {name: [] for name in checkouts}
    for number in range(PAIRS.value):
        for name in list(checkouts)[:: -1 if number % 2 else 1]:
            runs[name].append(started(checkouts[name].resolve(), arguments, steps))
            print(runs[name][-1].row(name, number + 1), flush=True)
    for name, several in runs.items():
        print(median_of(several).row(name, "median"))
    if "peer" in runs:
        ratios = [ours.cpu[""] / theirs.cpu[""] for ours, theirs in zip(runs["this"], runs["peer"], strict=True)]
        pairs = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"\nratio to the peer: {statistics.median(ratios):.2f}, the median of {pairs}")


def median_of(runs: Sequence[Started]) -> Started:
    """Returns the median of each number. What one of the runs did not say is left out."""
    marks = [mark for mark in runs[0].cpu if all(mark in run.cpu for run in runs)]
    cpu = {mark: statistics.median(run.cpu[mark] for run in runs) for mark in marks}
    return Started(cpu, statistics.median(run.wall for run in runs), statistics.median(run.load for run in runs))


def started(checkout: Path, arguments: Sequence[str], steps: int) -> Started:
    """Runs a checkout's training until `steps` steps are in metrics.jsonl, and kills it.

    Raises UserError, with the last line that it said, if it ends before.
    """
    with tempfile.TemporaryDirectory(prefix="rljax-start-") as scratch:
        workdir, said = Path(scratch) / "run", Path(scratch) / "said"
        command = [sys.executable, "-m", "experiments.train", *arguments, f"--workdir={workdir}"]
        unwanted = ("JAX_COMPILATION_CACHE_DIR", "PYTHONPATH")
        own = {name: value for name, value in os.environ.items() if name not in unwanted}
        environment = own | {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": scratch}
        load, began = os.getloadavg()[0], time.monotonic()
        with said.open("wb") as out:
            run = subprocess.Popen(
                command, cwd=checkout, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            cpu = _watched(run, workdir / "metrics.jsonl", said, steps)
            return Started(cpu, time.monotonic() - began, load)
        finally:
            if run.poll() is None:  # the group is this run's own
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def _watched(run: subprocess.Popen[bytes], metrics: Path, said: Path, steps: int) -> dict[str, float]:
    """Notes the CPU seconds at which a run reaches its marks, and waits for its last step."""
    cpu: dict[str, float] = {}
    while "" not in cpu:
        ended = run.poll() is not None
        lines = said.read_text(errors="replace").splitlines()
        done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        reached = [mark for mark in SAID if any(line.startswith(mark) for line in lines)]
        reached += [FIRST] * (done > 0) + [""] * (done >= steps)
        if ended and "" not in reached:
            raise UserError(f"the run ended before step {steps}: {lines[-1] if lines else 'it said nothing'}")
        if new := [mark for mark in reached if mark not in cpu]:
            cpu |= dict.fromkeys(new, cpu_of(run.pid))
        time.sleep(INTERVAL)
    return cpu


def cpu_of(pid: int) -> float:
    """Returns the CPU seconds of a process and all that it started, those that have ended included.

    A process that has ended counts once its parent has waited for it. 0 for a process that is gone.
    """
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold anything
        except OSError:  # it has just ended
            continue
        own = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(own)
        ticks[own] = sum(map(int, fields[11:15]))  # utime, stime, and both of its children
    tree = [pid]
    for each in tree:
        tree += children.get(each, [])
    return sum(ticks.get(each, 0) for each in tree) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main.define_config_flags(workdir=False)
    main.run_main(bench)
