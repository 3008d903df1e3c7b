"""experiments.train on the fake engine: a run directory that is whole, a kill that costs nothing,
a lock that holds.
"""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
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
    return binary("train", f"--config={config}", f"--workdir={workdir}", *overrides)


def binary(name: str, *arguments: str, path: Path | None = None) -> subprocess.Popen:
    """Starts experiments.<name> with a folder of the test's own modules on the path."""
    folders = [str(path)] if path else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-m", f"experiments.{name}", *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def train(workdir: Path, *overrides: str) -> tuple[int, str, str]:
    return finish(start(workdir, *overrides))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def comparable(entries: list[dict]) -> list[dict]:
    """Metrics without what a timer or the machine's load decides."""
    return [{k: v for k, v in entry.items() if not k.startswith(("timeperf/", "perf/", "rollout/wait"))} for entry in entries]


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


def test_a_run_says_what_it_is_and_a_start_that_fails_changes_no_record(uninterrupted, tmp_path):
    said = [line.split(" ", 3)[2:] for line in (uninterrupted / "log.txt").read_text().splitlines()]
    said = [(level, text) for level, text in said if not text.endswith(" ...")]  # of the stages, on a busy machine
    assert [(level, text.partition(":")[0]) for level, text in said[:5]] == [
        *(("INFO", name) for name in ("run", "model", "data", "steps", "devices"))
    ]
    told = dict(text.split(": ", 1) for _, text in said[:5])
    assert told["run"] == str(uninterrupted.resolve()) and "0.9049M parameters" in told["model"]
    assert told["steps"] == "4 warm-up steps, 30 steps of 4 prompts x 4 samples" and told["devices"] == "fake:d1"
    assert said[-1] == ("INFO", "finished at step 34")
    again = tmp_path / "again"
    shutil.copytree(uninterrupted, again)
    code, _, err = train(again, SYNCHRONOUS, "--config.reward.name=no_such_module:f", "--config.total_train_steps=40")
    assert code == 1 and "no_such_module" in err
    for name in ("config.json", "metrics.jsonl", "configs/1.json"):
        assert (again / name).read_text() == (uninterrupted / name).read_text(), name
    assert [path.name for path in (again / "configs").iterdir()] == ["1.json"]
    status = json.loads((again / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 34) and "no_such_module" in status["error"]
    assert "no_such_module" in (again / "log.txt").read_text().splitlines()[-1]


def test_documented_metrics_are_there_and_finite(uninterrupted):
    entries = lines(uninterrupted / "metrics.jsonl")
    trained = entries[-1]
    for name in ("importance_weight", "behave_imp_weight", "approx_kl", "clip_ratio", "entropy", "grad_norm", "lr"):
        assert any(key.startswith(f"ppo_actor/update/{name}") for key in trained), name
    for name in ("rollout/reward", "eval-rollout/reward", "ppo/actor/task_reward", "rollout/staleness", "reward/exact"):
        assert any(key.startswith(name) for entry in entries for key in entry), name
    assert all(value is not None for entry in entries for value in entry.values())


def test_supervised_steps_are_told_apart_from_reinforcement(uninterrupted):
    entries = lines(uninterrupted / "metrics.jsonl")
    assert all(("warmup/loss" in entry) == (entry["step"] <= 4) for entry in entries)
    assert all(("ppo_actor/update/loss" in entry) == (entry["step"] > 4) for entry in entries)


def test_sft_is_the_learner_alone(tmp_path):
    code, _, err = train(tmp_path / "sft", "--config.actor.loss=sft", "--config.actor.optimizer.lr=0.1")
    assert code == 0, err
    entries = lines(tmp_path / "sft" / "metrics.jsonl")
    assert entries[-1]["sft/loss"] < entries[0]["sft/loss"]
    assert not any(key.startswith("ppo_actor/") for entry in entries for key in entry)
    evaluated = [entry["step"] for entry in entries if "eval-rollout/reward/avg" in entry]
    assert evaluated and all(step % 6 == 0 for step in evaluated[:-1])


def kill_after_checkpoint(step: int, workdir: Path, *overrides: str) -> None:
    """Starts a run and ends it by SIGKILL as soon as that checkpoint is there."""
    process = start(workdir, *overrides)
    while not (workdir / "checkpoints" / str(step)).exists() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err


def assert_same_run(one: Path, other: Path) -> None:
    assert comparable(lines(one / "metrics.jsonl")) == comparable(lines(other / "metrics.jsonl"))
    assert lines(one / "samples.jsonl") == lines(other / "samples.jsonl")


def test_resume_equivalence_of_a_killed_run(uninterrupted, tmp_path):
    kill_after_checkpoint(9, tmp_path / "killed", SYNCHRONOUS)
    code, _, err = train(tmp_path / "killed", SYNCHRONOUS)
    assert code == 0, err
    assert_same_run(tmp_path / "killed", uninterrupted)


JAX = ("--config.allocation_mode=jax:d1", "--config.train_dataset.batch_size=8", "--config.jax.slots=32")


@pytest.mark.slow
def test_resume_equivalence_on_the_jax_path_to_the_bit(tmp_path):
    code, _, err = train(tmp_path / "whole", SYNCHRONOUS, *JAX)
    assert code == 0, err
    kill_after_checkpoint(9, tmp_path / "killed", SYNCHRONOUS, *JAX)
    code, _, err = train(tmp_path / "killed", SYNCHRONOUS, *JAX)
    assert code == 0, err
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_quickstart_over_eight_forced_devices(tmp_path, monkeypatch):
    """Sampler and learner on pools of their own: the first supervised steps agree with one
    device's to float32 rounding.
    """
    code, _, err = train(tmp_path / "one", SYNCHRONOUS, *JAX)
    assert code == 0, err
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    code, _, err = train(tmp_path / "eight", SYNCHRONOUS, *JAX, "--config.allocation_mode=jax:d2+jax:f2t2")
    assert code == 0, err
    one, eight = (lines(tmp_path / name / "metrics.jsonl") for name in ("one", "eight"))
    assert [entry["step"] for entry in one] == [entry["step"] for entry in eight]
    for a, b in zip(one[:4], eight[:4], strict=True):
        assert b["warmup/loss"] == pytest.approx(a["warmup/loss"], rel=1e-4)


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
    assert json.loads((workdir / "status.json").read_text())["state"] == "stopped"


def test_failing_workflow_ends_the_run_with_its_traceback(tmp_path):
    lines = (
        "def reward(prompt, completion):",
        "    return look(prompt)",
        "def look(prompt):",
        "    raise KeyError('no such field')",
    )
    (tmp_path / "broken_reward.py").write_text("\n".join(lines))
    (tmp_path / "config.py").write_text(CONFIG)
    workdir = tmp_path / "failing"
    code, _, err = finish(
        binary(
            "train",
            f"--config={tmp_path / 'config.py'}",
            f"--workdir={workdir}",
            "--config.reward.name=broken_reward:reward",
            "--config.recover.max_consecutive_failures=3",
            "--config.evaluator.freq_steps=None",
            path=tmp_path,
        )
    )
    assert code == 1
    shown = err[err.index("Traceback") :].splitlines()
    places = [line for line in shown if line.startswith("  File ")]
    assert ["broken_reward.py" in place for place in places] == [True, True], err
    assert "KeyError" in shown[-2] and "no such field" in shown[-2] and shown[-1].startswith("error: ")
    status = json.loads((workdir / "status.json").read_text())
    assert status["state"] == "failed" and status["error"]


@pytest.mark.slow
def test_unit_ratio_of_a_jax_workers_samples(tmp_path):
    """A JAX sampler in another process gets weights: synchronous steps are on policy."""
    workdir = tmp_path / "jax"
    process = start(
        workdir,
        SYNCHRONOUS,
        "--config.allocation_mode=jax:d1",
        "--config.rollout.listen=127.0.0.1:0",
        "--config.warmup.steps=2",
        "--config.total_train_steps=3",
        "--config.evaluator.freq_steps=None",
    )
    worker = binary("rollout", f"--attach={workdir}", "--config.allocation_mode=jax:d1")
    code, _, err = finish(process)
    assert code == 0, err
    assert finish(worker)[0] == 0
    steps = [entry for entry in lines(workdir / "metrics.jsonl") if "rollout/staleness/avg" in entry]
    assert len(steps) == 3 and all(entry["rollout/workers"] == 1 for entry in steps)
    for entry in steps:
        assert entry["rollout/staleness/max"] == 0
        for end in ("min", "max"):  # with weights of another version it is percents off
            assert entry[f"ppo_actor/update/behave_imp_weight/{end}"] == pytest.approx(1, abs=1e-3)


def test_a_guardrail_ends_the_run_in_one_line_and_the_failed_state_is_kept(tmp_path):
    workdir = tmp_path / "guarded"
    code, _, err = train(workdir, "--config.guard.min_entropy=99", "--config.guard.patience=2", "--config.warmup.steps=0")
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: guard.min_entropy: ppo_actor/update/entropy is 4.") and "2 steps in a row" in line
    assert "Traceback" not in err
    status = json.loads((workdir / "status.json").read_text())
    assert status["state"] == "failed" and f"error: {status['error']}" == line
    assert [p.name for p in (workdir / "checkpoints").iterdir()] == ["2-failed"]


def test_rollout_and_replay_are_the_first_step_of_train(tmp_path):
    """The same prompts, samples, advantages and update, apart and together: their metrics agree to
    the bit.
    """
    (tmp_path / "some_reward.py").write_text("def reward(prompt, completion):\n    return len(completion) % 3\n")
    (tmp_path / "config.py").write_text(CONFIG)
    common = [
        f"--config={tmp_path / 'config.py'}",
        SYNCHRONOUS,
        "--config.reward.name=some_reward:reward",
        "--config.warmup.steps=0",
        "--config.total_train_steps=1",
        "--config.evaluator.freq_steps=None",
    ]
    for name, arguments in {
        "train": [f"--workdir={tmp_path / 'train'}"],
        "rollout": [f"--out={tmp_path / 'batch'}"],
        "replay": [f"--batch={tmp_path / 'batch'}", f"--workdir={tmp_path / 'replay'}"],
    }.items():
        code, _, err = finish(binary(name, *common, *arguments, path=tmp_path))
        assert code == 0, err
    (trained,) = comparable(lines(tmp_path / "train" / "metrics.jsonl"))
    (replayed,) = comparable(lines(tmp_path / "replay" / "metrics.jsonl"))
    assert replayed["ppo_actor/update/grad_norm"] > 0 and replayed["ppo_actor/update/importance_weight/avg"] > 0
    assert replayed.items() <= trained.items()
    assert {key.split("/")[0] for key in trained.keys() - replayed.keys()} <= {"rollout"}  # what a producer and a buffer tell

    shards = [tmp_path / f"shard{i}" for i in range(3)]  # of 4 prompts: 2, 1 and 1
    for index, out in enumerate(shards):
        code, text, err = finish(binary("rollout", *common, f"--shard={index}/3", f"--out={out}", path=tmp_path))
        assert code == 0 and f"{2 if index == 0 else 1} groups" in text, err
    together = [f"--batch={','.join(map(str, shards))}", f"--workdir={tmp_path / 'together'}"]
    code, _, err = finish(binary("replay", *common, *together, path=tmp_path))
    assert code == 0, err
    assert comparable(lines(tmp_path / "together" / "metrics.jsonl")) == [replayed]
    in_two = [*together[:1], f"--workdir={tmp_path / 'ranks'}", "--config.allocation_mode=fake:d2"]
    code, _, err = finish(binary("replay", *common, *in_two, path=tmp_path))
    assert code == 0, err
    (in_ranks,) = comparable(lines(tmp_path / "ranks" / "metrics.jsonl"))
    assert in_ranks == pytest.approx(replayed, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("shard", ["2/2", "1"])
def test_a_shard_that_is_none_is_refused(shard, tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    arguments = [f"--config={tmp_path / 'config.py'}", f"--out={tmp_path / 'batch'}", f"--shard={shard}"]
    code, _, err = finish(binary("rollout", *arguments))
    assert code == 1 and err == f"error: --shard: {shard!r} is not INDEX/COUNT, counted from 0, as in 0/4\n"


def told(entries: list[dict]) -> list[dict]:
    return [{k: v for k, v in e.items() if k != "rollout/workers"} for e in comparable(entries)]


def test_resume_equivalence_with_workers_though_one_is_killed(uninterrupted, tmp_path):
    """Two worker processes with the run's sampler; the first is killed with leases in its hands
    and started again.
    """
    workdir = tmp_path / "workers"
    process = start(workdir, SYNCHRONOUS, "--config.rollout.workers=2")
    while not (workdir / "metrics.jsonl").exists() or len(lines(workdir / "metrics.jsonl")) < 8:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    children = [p for p in psutil.Process(process.pid).children() if "experiments.rollout" in " ".join(p.cmdline())]
    assert len(children) == 2
    children[0].kill()
    code, _, err = finish(process)
    assert code == 0, err
    assert not psutil.pid_exists(children[1].pid)
    attached, alone = told(lines(workdir / "metrics.jsonl")), told(lines(uninterrupted / "metrics.jsonl"))
    assert [e["step"] for e in attached] == [e["step"] for e in alone] == list(range(1, 35))
    # A lease that died is generated again with other seeds: from there on the runs differ. Until then they are the same.
    same = next((i for i, e in enumerate(attached) if e.get("rollout/again")), len(attached))
    assert same >= 8 and attached[:same] == alone[:same]


def test_a_worker_from_elsewhere_with_a_sampler_of_its_own_waits_for_a_run_that_was_killed(tmp_path):
    """It attaches by address and token, outlives the trainer, and goes on with the next one, at
    the same address.
    """
    (port,) = (s.getsockname()[1] for s in [socket.create_server(("127.0.0.1", 0))])
    workdir, listen = tmp_path / "listening", f"--config.rollout.listen=127.0.0.1:{port}"
    environment = os.environ | {"RLJAX_TOKEN": "a secret"}
    config = workdir.with_suffix(".py")
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "experiments.train", f"--config={config}", f"--workdir={workdir}", listen]
    attach = [sys.executable, "-m", "experiments.rollout", f"--attach=127.0.0.1:{port}", "--config.allocation_mode=fake:d1"]
    pipes = {"cwd": REPOSITORY, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    worker, trainer = subprocess.Popen(attach, **pipes), subprocess.Popen(command, **pipes)
    while not (workdir / "metrics.jsonl").exists() or len(lines(workdir / "metrics.jsonl")) < 8:
        assert trainer.poll() is None and worker.poll() is None, (trainer.communicate(), worker.communicate())
        time.sleep(0.005)
    assert stat.S_IMODE((workdir / "workers.json").stat().st_mode) == 0o600
    trainer.kill()
    trainer.communicate()
    code, out, err = finish(subprocess.Popen(command, **pipes))
    assert code == 0 and "step 34/34" in out, err
    code, _, err = finish(worker)
    assert code == 0 and "looking for one" in err
    assert [e["step"] for e in lines(workdir / "metrics.jsonl")] == list(range(1, 35))
