"""A small configs/algorithms/distill.py on the JAX path: trains a teacher, exports it, distills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = """
from rljax.configs.algorithms import {algorithm}

def get_config():
    config = {algorithm}.get_config()
    config.actor.init.hidden_size = 96
    config.actor.init.intermediate_size = 256
    config.actor.init.num_heads = config.actor.init.num_kv_heads = 3
    for dataset in (config.train_dataset, config.valid_dataset):
        dataset.task.digits = 1
    config.valid_dataset.split = "train"  # what was taught, not what follows from it
    config.stats_logger.live = False
    config.evaluator.freq_steps = 1000
    return config
"""


def test_a_student_comes_near_its_teacher_in_reverse_kl_and_in_accuracy(tmp_path):
    taught = {
        "actor.distill.teacher": tmp_path / "teacher" / "export",
        "warmup.steps": 40,  # more, and the student is so sure of its wrong answers that it samples no others
        "total_train_steps": 130,
        "train_dataset.batch_size": 64,
        "actor.ppo_n_minibatches": 1,
    }
    train(tmp_path / "teacher", "sft", total_train_steps=400)
    lines = train(tmp_path / "student", "distill", **taught)
    held_out = [line["eval-rollout/reward/avg"] for line in lines if "eval-rollout/reward/avg" in line]
    divergence = [line["ppo_actor/update/teacher_kl"] for line in lines if "ppo_actor/update/teacher_kl" in line]
    of_teacher = [
        line["eval-rollout/reward/avg"] for line in metrics(tmp_path / "teacher") if "eval-rollout/reward/avg" in line
    ]
    assert of_teacher[-1] > 0.9 and held_out[0] < 0.4
    assert held_out[-1] > (held_out[0] + of_teacher[-1]) / 2, (held_out, of_teacher)
    assert sum(divergence[-5:]) / 5 < divergence[0] / 2, divergence
    refused = train(tmp_path / "refused", "distill", fails=True, **taught | {"actor.distill.teacher": tmp_path / "nobody"})
    assert refused == f"error: actor.distill.teacher: no config.json in {tmp_path / 'nobody'}"


def train(workdir: Path, algorithm: str, *, fails: bool = False, **settings: object) -> list[dict[str, float]] | str:
    """Returns a run's metrics by line; if it should fail, its last line up to the remedy."""
    config = workdir.with_suffix(".py")
    config.write_text(SMALL.format(algorithm=algorithm))
    flags = [f"--config={config}", f"--workdir={workdir}", *(f"--config.{key}={value}" for key, value in settings.items())]
    command = [sys.executable, "-m", "experiments.train", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr.splitlines()[-1].partition(" (")[0] if fails else metrics(workdir)


def column(lines: list[dict[str, float]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def metrics(workdir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
