"""One GRPO step beside TRL's GRPOTrainer and google-tunix's GRPOLearner: sample, score, update,
publish.

python -m experiments.bench.grpo_step --peers=                      # ours alone
python -m experiments.bench.grpo_step --peers=trl                   # TRL in this environment
python -m experiments.bench.grpo_step --peers=trl,tunix --trl_python=PYTHON --tunix_python=PYTHON

Prints seconds, and the ratio to each peer. 4-layer Llama, hidden 256, vocabulary 1000; 8 prompts
times 8 samples, up to 32 new tokens; float32, the same weights, prompts, batch and threads. Each
runs in a process of its own, one after the other, several times in turn; the figure is the median
over steps, the first ones (compilation, caches) left out. A peer's environment needs `trl` and
torch, or `google-tunix`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags

from rljax import json_lines
from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.bench import grpo_step_task

STEPS = flags.DEFINE_integer("steps", 20, "Steps per run; the first quarter is not counted.", lower_bound=4)
ROUNDS = flags.DEFINE_integer("rounds", 2, "Runs of each, in turn.", lower_bound=1)
THREADS = flags.DEFINE_integer("threads", os.cpu_count(), "Threads of each.", lower_bound=1)
PEERS = flags.DEFINE_list("peers", ["trl"], "Libraries to compare with: trl, tunix.")
PYTHONS = {
    "trl": flags.DEFINE_string("trl_python", sys.executable, "The interpreter that has TRL."),
    "tunix": flags.DEFINE_string("tunix_python", sys.executable, "The interpreter that has google-tunix."),
}


def ours(model: Path, data: Path, workdir: Path) -> list[float]:
    """Returns seconds per step, from metrics.jsonl of a run of experiments.train."""
    command = [sys.executable, "-m", "rljax.experiments.train", "--config=bench/grpo_step", f"--workdir={workdir}"]
    command += [f"--config.actor.path={model}", f"--config.train_dataset.path={data}"]
    _run([*command, f"--config.total_train_steps={STEPS.value}"])
    return [entry["timeperf/wall"] for entry in json_lines.entries(workdir / "metrics.jsonl")]


def theirs(peer: str, model: Path, workdir: Path) -> list[float]:
    """Returns seconds per step, as the peer's script prints them."""
    command = [PYTHONS[peer].value, "-W", "ignore", "-m", f"rljax.experiments.bench.grpo_step_{peer}", str(model), str(workdir)]
    return list(json.loads(_run([*command, str(STEPS.value), str(THREADS.value)]).splitlines()[-1]))


def _run(command: Sequence[str]) -> str:
    threads = {"OMP_NUM_THREADS": str(THREADS.value), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(f"{' '.join(command[:4])}: exit status {done.returncode}: {' '.join(last)}")
    return done.stdout


def bench() -> None:
    if unknown := set(PEERS.value) - set(PYTHONS):
        raise UserError(f"--peers: no {min(unknown)!r} ({', '.join(PYTHONS)})")
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model, data = grpo_step_task.make(directory)
        for turn in range(ROUNDS.value):
            runs = {"rljax": ours(model, data, directory / f"rljax{turn}")}
            for peer in PEERS.value:
                runs[peer] = theirs(peer, model, directory / f"{peer}{turn}")
            for name, steps in runs.items():
                seconds.setdefault(name, []).extend(steps[len(steps) // 4 :])
    median = {name: float(np.median(steps)) for name, steps in seconds.items()}
    for name, steps in seconds.items():
        low, high = np.quantile(steps, [0.1, 0.9])
        times = "" if name == "rljax" else f"; {median[name] / median['rljax']:.2f} times rljax's"
        print(f"{name:6s} {median[name]:.3f} s a step (median of {len(steps)}; 10% {low:.3f}, 90% {high:.3f}{times})")
    print(f"{THREADS.value} threads")


if __name__ == "__main__":
    main.run_main(bench)
