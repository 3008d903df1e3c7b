"""One GRPO step beside TRL's GRPOTrainer: sample, score, update, publish.

python -m experiments.bench.grpo_step                        # TRL in this one: extras torch, trl
python -m experiments.bench.grpo_step --peer_python=PYTHON   # TRL in another environment
python -m experiments.bench.grpo_step --peer=none

Prints seconds, and the ratio. 4-layer Llama, hidden 256, vocabulary 1000; 8 prompts times 8
samples, up to 32 new tokens; float32, the same weights, prompts, batch and threads. Each runs in a
process of its own, one after the other, several times in turn; the figure is the median over
steps, the first ones (compilation, caches) left out.
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

from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.bench import grpo_step_task

STEPS = flags.DEFINE_integer("steps", 20, "Steps per run; the first quarter is not counted.", lower_bound=4)
ROUNDS = flags.DEFINE_integer("rounds", 2, "Runs of each, in turn.", lower_bound=1)
THREADS = flags.DEFINE_integer("threads", os.cpu_count(), "Threads of each.", lower_bound=1)
PEER = flags.DEFINE_enum("peer", "trl", ["trl", "none"], "Library to compare with.")
PEER_PYTHON = flags.DEFINE_string("peer_python", sys.executable, "The interpreter that has the peer.")


def ours(model: Path, data: Path, workdir: Path) -> list[float]:
    """Returns seconds per step, from metrics.jsonl of a run of experiments.train."""
    command = [sys.executable, "-m", "rljax.experiments.train", "--config=bench/grpo_step", f"--workdir={workdir}"]
    command += [f"--config.actor.path={model}", f"--config.train_dataset.path={data}"]
    _run([*command, f"--config.total_train_steps={STEPS.value}"])
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["timeperf/wall"] for line in lines]


def trl(model: Path, workdir: Path) -> list[float]:
    command = [PEER_PYTHON.value, "-W", "ignore", "-m", "rljax.experiments.bench.grpo_step_trl", str(model), str(workdir)]
    return list(json.loads(_run([*command, str(STEPS.value), str(THREADS.value)]).splitlines()[-1]))


def _run(command: Sequence[str]) -> str:
    threads = {"OMP_NUM_THREADS": str(THREADS.value), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError(f"{' '.join(command[:4])}: exit status {done.returncode}: {' '.join(last)}")
    return done.stdout


def bench() -> None:
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        model, data = grpo_step_task.make(directory)
        for turn in range(ROUNDS.value):
            runs = {"rljax": ours(model, data, directory / f"rljax{turn}")}
            if PEER.value == "trl":
                runs["trl"] = trl(model, directory / f"trl{turn}")
            for name, steps in runs.items():
                seconds.setdefault(name, []).extend(steps[len(steps) // 4 :])
    for name, steps in seconds.items():
        low, middle, high = np.quantile(steps, [0.1, 0.5, 0.9])
        print(
            f"{name:6s} {middle:.3f} s a step (median of {len(steps)}; 10% {low:.3f}, 90% {high:.3f}; {THREADS.value} threads)"
        )
    if "trl" in seconds:
        print(f"ratio  {np.median(seconds['trl']) / np.median(seconds['rljax']):.2f}")


if __name__ == "__main__":
    main.run_main(bench)
