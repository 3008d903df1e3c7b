"""A run whose learning rate is a hundred times too high rolls back by itself and learns as it should."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
GUARDED = (
    "--config.guard.action=rollback",
    "--config.guard.rollback_lr_factor=0.1",
    "--config.guard.max_approx_kl=0.1",
    "--config.guard.patience=1",
)


def _train(workdir: Path, *overrides: str) -> list[dict]:
    """Runs the quickstart to its end. Returns the lines of metrics.jsonl."""
    command = [sys.executable, "-m", "experiments.train", "--config=quickstart", f"--workdir={workdir}", *overrides]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow  # minutes: the quickstart twice, from one warm-up
def test_a_learning_rate_100_times_too_high_rolls_back_and_ends_as_the_right_one_does(tmp_path):
    healthy, hot = tmp_path / "healthy", tmp_path / "hot"
    _train(healthy, "--config.total_train_steps=0", "--config.saver.export_final=False")
    shutil.copytree(healthy, hot)
    rewards = {}
    for workdir, overrides in ((healthy, ()), (hot, ("--config.actor.optimizer.lr=3e-2", *GUARDED))):
        lines = _train(workdir, *overrides)
        rewards[workdir] = [line["eval-rollout/reward/avg"] for line in lines if "eval-rollout/reward/avg" in line][-1]
    events = [json.loads(line) for line in (hot / "guard.jsonl").read_text().splitlines()]
    assert {event["action"] for event in events} == {"rollback"}
    assert rewards[hot] > rewards[healthy] - 0.05 and rewards[healthy] > 0.9
