"""A run whose learning rate is a hundred times too high rolls back by itself and learns as it should."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
ROLLBACK = "--config.guard.action=rollback"
GUARDED = {
    "default bounds": (ROLLBACK,),
    "tight bounds": (
        ROLLBACK,
        "--config.guard.rollback_lr_factor=0.1",
        "--config.guard.max_approx_kl=0.1",
        "--config.guard.patience=1",
    ),
}


def _train(workdir: Path, *overrides: str) -> list[dict]:
    """Runs the quickstart to its end. Returns the lines of metrics.jsonl."""
    command = [sys.executable, "-m", "experiments.train", "--config=quickstart", f"--workdir={workdir}", *overrides]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory) -> Path:
    """The quickstart before RL."""
    workdir = tmp_path_factory.mktemp("warm") / "up"
    _train(workdir, "--config.total_train_steps=0", "--config.saver.export_final=False")
    return workdir


@pytest.fixture(scope="module")
def healthy(warmed_up, tmp_path_factory) -> float:
    """Held-out reward that the quickstart ends with."""
    workdir = tmp_path_factory.mktemp("healthy") / "run"
    shutil.copytree(warmed_up, workdir)
    return _last_evaluation(_train(workdir))


def _last_evaluation(lines: list[dict]) -> float:
    return [line["eval-rollout/reward/avg"] for line in lines if "eval-rollout/reward/avg" in line][-1]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the quickstart three times, from one warm-up: minutes each, on a busy machine many
@pytest.mark.parametrize("bounds", GUARDED)
def test_a_learning_rate_100_times_too_high_rolls_back_and_ends_as_the_right_one_does(tmp_path, warmed_up, healthy, bounds):
    hot = tmp_path / "hot"
    shutil.copytree(warmed_up, hot)
    reward = _last_evaluation(_train(hot, "--config.actor.optimizer.lr=3e-2", *GUARDED[bounds]))
    events = [json.loads(line) for line in (hot / "guard.jsonl").read_text().splitlines()]
    assert {event["action"] for event in events} == {"rollback"}
    assert reward > healthy - 0.05 and healthy > 0.9
