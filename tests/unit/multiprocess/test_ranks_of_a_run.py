"""Whole runs of experiments.train whose fake learner lives in three processes: the same numbers,
and what a lost rank does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rljax.engine.rank import free_port
from tests.unit.multiprocess import troubled

Start = Callable[..., subprocess.Popen]  # (workdir, *arguments, **variables)
REPOSITORY = Path(__file__).resolve().parents[3]

CONFIG = """
from rljax.configs import quickstart

def get_config():
    config = quickstart.get_config()
    config.allocation_mode = "troubled:d1+troubled:d3"
    config.warmup.steps = 2
    config.total_train_steps = 24
    config.train_dataset.batch_size = 4
    config.gconfig.n_samples = 4
    config.actor.ppo_n_minibatches = 2
    config.actor.kl_ctl = 0.01
    config.rollout.max_head_offpolicyness = 0
    config.reward.name = "lengths:reward"
    config.reward.workers = 1
    config.saver.freq_steps = 2
    config.evaluator.freq_steps = None
    config.valid_dataset.path = ""
    return config
"""
ONE = "--config.allocation_mode=troubled:d1"
LONG = ("--config.total_train_steps=100000", "--config.total_train_epochs=100000", "--config.saver.freq_steps=5")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    folder = troubled.install(tmp_path_factory.mktemp("installed"))
    (folder / "config.py").write_text(CONFIG)
    return folder


@contextlib.contextmanager
def starting(installed: Path) -> Iterator[Start]:
    """Starts experiments.train; whatever is left of it is killed in the end."""
    started: list[subprocess.Popen] = []

    def run(workdir: Path, *arguments: str, **variables: str) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": str(installed)} | variables
        config = f"--config={installed / 'config.py'}"
        command = [sys.executable, "-m", "experiments.train", config, f"--workdir={workdir}", *arguments]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(subprocess.Popen(command, cwd=REPOSITORY, text=True, env=environment, **pipes))
        return started[-1]

    try:
        yield run
    finally:
        for process in started:
            left = followers_of(process)
            process.kill()
            process.communicate()
            for follower in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    follower.kill()


@pytest.fixture
def start(installed) -> Iterator[Start]:
    with starting(installed) as run:
        yield run


@pytest.fixture(scope="module")
def one(installed, tmp_path_factory) -> Path:
    return finished(installed, tmp_path_factory.mktemp("one") / "run", ONE)


@pytest.fixture(scope="module")
def three(installed, tmp_path_factory) -> Path:
    return finished(installed, tmp_path_factory.mktemp("three") / "run")


def finished(installed: Path, workdir: Path, *arguments: str) -> Path:
    with starting(installed) as run:
        code, err = finish(run(workdir, *arguments))
    assert code == 0, err
    return workdir


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, err = process.communicate(timeout=240)
    return process.returncode, err


def followers_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Returns the follower processes of a run, in the order of their ranks."""
    try:
        children = psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []
    found = [child for child in children if "rljax.multiprocess" in child.cmdline()]
    return sorted(found, key=lambda child: int(child.environ()["RANK"]))


def metrics_of(workdir: Path, names: tuple[str, ...]) -> list[list[float]]:
    return [[line[name] for name in names if name in line] for line in metrics(workdir)]


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=20)[1]


def metrics(workdir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("timeperf/", "perf/", "rollout/wait"))} for line in lines]


def status(workdir: Path) -> dict:
    return json.loads((workdir / "status.json").read_text())


def assert_close(got: list[dict], want: list[dict]) -> None:
    """Compares to the rounding of sums in another order."""
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6)


def test_three_processes_give_the_metrics_of_one_and_tell_how_even_their_work_was(one, three):
    assert_close(metrics(three), metrics(one))
    lines = [json.loads(line) for line in (three / "metrics.jsonl").read_text().splitlines()]
    assert all(line["timeperf/rank_spread/avg"] >= 0 for line in lines)
    assert not (three / "ranks" / "leader.json").exists()  # the token goes with the run


def test_a_killed_rank_ends_the_run_and_the_same_command_goes_on(start, three, tmp_path):
    """The leader waits in a collective for the rank that was stopped before it was killed."""
    run = start(tmp_path / "run")
    wait_for(tmp_path / "run" / "checkpoints" / "4", run)
    followers = followers_of(run)
    followers[1].suspend()
    time.sleep(0.3)
    before = time.monotonic()
    followers[1].kill()
    code, err = finish(run)
    assert time.monotonic() - before < 60
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("error: rank 2 (") and last.endswith("was killed by SIGKILL")
    told = status(tmp_path / "run")
    assert told["state"] == "failed" and told["error"] == last.removeprefix("error: ")
    assert gone(followers)
    code, err = finish(start(tmp_path / "run"))
    assert code == 0, err
    assert status(tmp_path / "run")["state"] == "finished"
    assert metrics(tmp_path / "run") == metrics(three)  # resume equivalence, to the bit


@pytest.mark.parametrize(
    ("trouble", "line", "detail"),
    [
        ("raise", "failed: update: KeyError: 'no such weight'", 'raise KeyError("no such weight")'),
        ("die", "ended with status 7", "last words"),
        pytest.param("refuse", "failed alone: actor.path: this host has no such file", "", marks=pytest.mark.slow),  # 30 s
    ],
)
def test_trouble_in_one_rank_ends_the_run_by_its_name(start, tmp_path, trouble, line, detail):
    code, err = finish(start(tmp_path / "run", TROUBLE=trouble))
    last = err.splitlines()[-1]
    assert code == 1 and last.startswith("error: rank 1 (") and last.endswith(line), err
    assert detail in err
    told = status(tmp_path / "run")
    assert told["state"] == "failed" and told["error"].endswith(line)


def test_a_rank_that_hangs_ends_the_run_with_the_stacks_of_all(start, tmp_path):
    code, err = finish(start(tmp_path / "run", "--config.recover.hang_timeout=7.0", TROUBLE="hang"))
    told = status(tmp_path / "run")["error"]
    assert code == 1 and err.splitlines()[-1] == f"error: {told}"
    assert told.startswith("recover.hang_timeout: nothing moved: rank 1 (") and ") in update" in told
    assert "in update" in (tmp_path / "run" / "hang.rank1.txt").read_text()
    assert "in gather" in (tmp_path / "run" / "ranks" / "leader.stacks.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_is_frozen_ends_the_run(start, tmp_path):
    run = start(tmp_path / "run", *LONG, "--config.recover.hang_timeout=12.0")
    wait_for(tmp_path / "run" / "checkpoints" / "5", run)
    followers = followers_of(run)
    followers[1].suspend()
    code, err = finish(run)
    assert code == 1 and "rank 2 (" in err.splitlines()[-1], err
    assert gone(followers)


def test_a_rank_that_does_not_come_up_is_told_with_its_log(start, tmp_path):
    code, err = finish(start(tmp_path / "run", TROUBLE="start"))
    assert code == 1 and "no driver was found" in err
    assert err.splitlines()[-1] == "error: rank 1 did not start: ended with status 9"
    assert status(tmp_path / "run")["state"] == "failed"


def test_followers_end_with_their_leader(start, tmp_path):
    run = start(tmp_path / "run", *LONG)
    wait_for(tmp_path / "run" / "checkpoints" / "5", run)
    followers = followers_of(run)
    assert len(followers) == 2
    run.kill()
    assert gone(followers)


def launched(start, workdir: Path, *arguments: str, size: int = 3, **variables: str) -> list[subprocess.Popen]:
    """Starts processes as torchrun does: all run the same command."""
    port = str(free_port("127.0.0.1"))
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [start(workdir, *arguments, RANK=str(i), LOCAL_RANK=str(i), **(common | variables)) for i in range(size)]


def test_processes_of_a_launcher_train_as_one_and_save_when_all_are_asked_to_stop(start, one, tmp_path):
    endless = ("--config.total_train_steps=100000", "--config.total_train_epochs=100000")
    hosts = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}  # one process a host, as far as anyone can tell
    processes = launched(start, tmp_path / "run", *endless, **hosts)
    wait_for(tmp_path / "run" / "checkpoints" / "4", processes[0])
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [finish(process)[0] for process in processes] == [0, 0, 0]
    assert status(tmp_path / "run")["state"] == "stopped"
    steps = len(metrics(tmp_path / "run"))
    assert steps >= 4
    common = min(steps, len(metrics(one)))
    assert_close(metrics(tmp_path / "run")[:common], metrics(one)[:common])


def test_a_launcher_that_starts_another_number_is_refused_in_every_process(start, tmp_path):
    for process in launched(start, tmp_path / "run", size=2):
        code, err = finish(process)
        assert code == 1 and "troubled:d3 learns in 3 processes, but WORLD_SIZE=2" in err.splitlines()[-1]


def test_more_processes_than_this_host_has_use_for_are_refused_before_any_starts(start, tmp_path):
    many = max(8, os.cpu_count() or 1) + 1
    run = start(tmp_path / "run", f"--config.allocation_mode=troubled:d1+troubled:d{many}")
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 1 and f"a learner of {many} processes on this host" in errors.splitlines()[-1]
    assert not list((tmp_path / "run").rglob("rank*.log"))


def test_an_engine_that_knows_nothing_of_ranks_learns_in_one_process(start, tmp_path):
    alone = "--config.allocation_mode=lonely:d2"
    code, err = finish(start(tmp_path / "run", alone))
    assert code == 0, err
    (refused, _) = launched(start, tmp_path / "two", alone, size=2)
    code, err = finish(refused)
    assert code == 1 and "lonely:d2 learns in 1 process, but WORLD_SIZE=2" in err


REAL = (
    "--config.train_dataset.batch_size=4",
    "--config.warmup.steps=3",
    "--config.actor.kl_ctl=0.0",
    "--config.total_train_steps=9",
    "--config.jax.slots=16",
)
TWO_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "OMP_NUM_THREADS": "1"}
LEARNERS = {
    "jax": ("--config.allocation_mode=jax:d1+jax:f2", "--config.jax.processes=2"),  # the second device of each process but one
    "fsdp": ("--config.allocation_mode=jax:d1+fsdp:f2",),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("learner", LEARNERS)
def test_a_real_learner_in_two_processes_trains_is_killed_and_goes_on(start, tmp_path, learner):
    """Both learn as the JAX learner does in one process, and as their shadow; a killed rank is
    noticed in the middle of gloo's collectives.
    """
    arguments = (*REAL, *LEARNERS[learner], "--config.parity.shadow_every=1")
    run = start(tmp_path / "run", *arguments, **TWO_DEVICES)
    wait_for(tmp_path / "run" / "checkpoints" / "6", run)
    (follower,) = followers_of(run)
    before = time.monotonic()
    follower.kill()
    code, err = finish(run)
    assert time.monotonic() - before < 60
    assert code == 1 and "was killed by SIGKILL" in err.splitlines()[-1]
    code, err = finish(start(tmp_path / "run", *arguments, **TWO_DEVICES))
    assert code == 0, err
    assert status(tmp_path / "run")["state"] == "finished"
    lines = metrics(tmp_path / "run")
    assert any("parity/excess" in line or "parity/dropped" in line for line in lines)  # it was given a batch
    assert all(line.get("parity/excess", 0) < 1 for line in lines)  # of a short run it may answer none in time
    assert "without a shadow" not in (tmp_path / "run" / "log.txt").read_text()
    one = start(tmp_path / "one", *REAL, "--config.allocation_mode=jax:d1", **TWO_DEVICES)
    code, err = finish(one)
    assert code == 0, err
    names = ("step", "warmup/loss", "ppo_actor/update/entropy", "ppo_actor/update/grad_norm", "rollout/reward/avg")
    pairs = zip(metrics_of(tmp_path / "run", names), metrics_of(tmp_path / "one", names), strict=True)
    for got, want in list(pairs)[:6]:  # then a sampled token may differ, by rounding
        assert got == pytest.approx(want, rel=1e-3)
