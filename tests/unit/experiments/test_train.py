"""experiments.train on the fake engine: a run directory that is whole, a kill that costs nothing, a lock that holds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

CONFIG = """
from rljax.configs import quickstart

def get_config():
    config = quickstart.get_config()
    config.allocation_mode = "fake:d1"
    config.warmup.steps = 4
    config.total_train_steps = 30
    config.train_dataset.batch_size = 4
    config.gconfig.n_samples = 4
    config.saver.freq_steps = 3
    config.evaluator.freq_steps = 6
    config.evaluator.max_prompts = 8
    config.reward.workers = 1
    return config
"""


def start(workdir: Path, *overrides: str) -> subprocess.Popen:
    config = workdir.with_suffix(".py")
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "experiments.train", f"--config={config}", f"--workdir={workdir}", *overrides]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(workdir: Path, *overrides: str) -> tuple[int, str, str]:
    process = start(workdir, *overrides)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def comparable(entries: list[dict]) -> list[dict]:
    """Metrics without what a clock or the machine's load decides."""
    return [{k: v for k, v in entry.items() if not k.startswith(("timeperf/", "rollout/wait"))} for entry in entries]


SYNCHRONOUS = "--config.rollout.max_head_offpolicyness=0"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    code, out, err = train(workdir, SYNCHRONOUS)
    assert code == 0, err
    assert "step 34/34" in out and "finished" in out
    return workdir


def test_run_directory_is_whole(uninterrupted):
    status = json.loads((uninterrupted / "status.json").read_text())
    assert (status["state"], status["step"], status["version"], status["error"]) == ("finished", 34, 30, None)
    assert [entry["step"] for entry in lines(uninterrupted / "metrics.jsonl")] == list(range(1, 35))
    config = json.loads((uninterrupted / "config.json").read_text())
    assert config["rollout"]["max_head_offpolicyness"] == 0 and config["rollout"]["consumer_batch_size"] == 4
    samples = lines(uninterrupted / "samples.jsonl")
    assert {sample["step"] for sample in samples} == set(range(5, 35))
    assert all(
        sample["prompt"].endswith("=") and sample["versions"] == [[sample["step"] - 5, sample["trained_tokens"]]]
        for sample in samples
    )
    assert {path.name for path in (uninterrupted / "checkpoints").iterdir()} >= {"33", "34"}
    assert (uninterrupted / "export").is_dir()


def test_metrics_of_section_6_are_there_and_finite(uninterrupted):
    entries = lines(uninterrupted / "metrics.jsonl")
    trained = entries[-1]
    for name in ("importance_weight", "behave_imp_weight", "approx_kl", "clip_ratio", "entropy", "grad_norm", "lr"):
        assert any(key.startswith(f"ppo_actor/update/{name}") for key in trained), name
    for name in ("rollout/reward", "eval-rollout/reward", "ppo/actor/task_reward", "rollout/staleness", "reward/exact"):
        assert any(key.startswith(name) for entry in entries for key in entry), name
    assert all(value is not None for entry in entries for value in entry.values())


def test_law_10_killed_and_resumed_is_as_if_never_killed(uninterrupted, tmp_path):
    workdir = tmp_path / "killed"
    process = start(workdir, SYNCHRONOUS)
    deadline = time.monotonic() + 120
    while not (workdir / "checkpoints" / "9").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    code, _, err = train(workdir, SYNCHRONOUS)
    assert code == 0, err
    assert comparable(lines(workdir / "metrics.jsonl")) == comparable(lines(uninterrupted / "metrics.jsonl"))
    assert lines(workdir / "samples.jsonl") == lines(uninterrupted / "samples.jsonl")


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_lives(tmp_path):
    workdir = tmp_path / "shared"
    first = start(workdir, "--config.total_train_steps=100000", "--config.total_train_epochs=100000")
    while not (workdir / "metrics.jsonl").exists() and first.poll() is None:
        time.sleep(0.01)
    code, _, err = train(workdir)
    assert (
        code == 1 and err == f"error: --workdir: {workdir} is in use by process {first.pid} (wait for it, or choose another)\n"
    )
    first.send_signal(signal.SIGTERM)  # it saves and ends well
    _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert json.loads((workdir / "status.json").read_text())["state"] == "running"


def test_trap_17_a_workflow_that_always_fails_ends_the_run_with_its_traceback(tmp_path):
    (tmp_path / "broken_reward.py").write_text("def reward(prompt, completion):\n    raise KeyError('no such field')\n")
    workdir = tmp_path / "failing"
    workdir.with_suffix(".py").write_text(CONFIG)
    command = [sys.executable, "-m", "experiments.train", f"--config={workdir.with_suffix('.py')}", f"--workdir={workdir}"]
    command += [
        "--config.reward.name=broken_reward:reward",
        "--config.recover.max_consecutive_failures=3",
        "--config.evaluator.freq_steps=None",
    ]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=240, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 1
    assert "KeyError" in done.stderr and "no such field" in done.stderr
    status = json.loads((workdir / "status.json").read_text())
    assert status["state"] == "failed" and status["error"]
