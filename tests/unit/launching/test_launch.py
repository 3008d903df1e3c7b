"""`experiments.launch`: what it writes and refuses, and runs that its files start for real."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljax.engine.rank import free_port

REPOSITORY = Path(__file__).resolve().parents[3]
SERVERS = ("--topology=h100:16", "--config.allocation_mode=sglang:d8+fsdp:f16")


def launch(out, *arguments):
    """Runs the binary in a process in which it may import neither framework."""
    script = (
        "import runpy, sys\n"
        "sys.modules['jax'] = sys.modules['torch'] = None\n"
        "sys.argv[0] = 'launch'\n"
        "runpy.run_module('experiments.launch', run_name='__main__', alter_sys=True)\n"
    )
    line = [sys.executable, "-c", script, "--config=quickstart", f"--workdir={out}/run", f"--out={out}/launch", *arguments]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_files_are_written_for_the_ways_that_are_asked_for_and_no_framework_is_needed(tmp_path):
    done = launch(tmp_path, *SERVERS, "--env=NCCL_DEBUG=INFO", "--config.actor.optimizer.lr=1e-5")
    assert done.returncode == 0, done.stderr
    first, *written = done.stdout.splitlines()
    assert first == "rljax: 2 hosts to train, 8 processes each; 1 host to serve"
    assert {Path(path).name for path in written} == {"job.json", "hosts.sh", "torchrun.sh", "slurm.sh", "ray.sh"}
    job = json.loads((tmp_path / "launch/job.json").read_text())
    for side in ("train", "serve"):
        assert job[side]["command"][0] == "--config=quickstart" and "--config.actor.optimizer.lr=1e-5" in job[side]["command"]
    done = launch(tmp_path, "--topology=h100:8", "--config.allocation_mode=sglang:d4+fsdp:f4", "--to=slurm")
    assert done.returncode == 0 and {path.name for path in (tmp_path / "launch").iterdir()} == {"job.json", "slurm.sh"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "--topology: missing"),
        ((*SERVERS, "--to=gke", "--claim=c"), "--image: missing, and --to=gke needs it"),
        ((*SERVERS, "--to=gke", "--claim=c", "--image=i"), "is not below --mount=/data"),
        ((*SERVERS, "--env=HF_TOKEN=abc"), "--env: HF_TOKEN is a secret"),
        ((*SERVERS, "--env=A B=1"), "--env: 'A B=1' is not NAME=VALUE"),
        (("--topology=h100:8", "--config.allocation_mode=jax:f5"), "f5 does not divide the model's 192 elements"),
    ],
)
def test_what_is_missing_is_named_in_one_line_and_nothing_is_written(tmp_path, arguments, line):
    done = launch(tmp_path, *arguments)
    assert done.returncode == 1 and line in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    assert not (tmp_path / "launch").exists()


SMALL = (
    *("--config.train_dataset.batch_size=4", "--config.warmup.steps=3", "--config.total_train_steps=6"),
    *("--config.actor.kl_ctl=0.0", "--config.jax.slots=16", "--env=OMP_NUM_THREADS=1", "--env=JAX_PLATFORMS=cpu"),
)
RUNS = {
    "fsdp": ("--topology=cpu:2", "--devices_per_host=1", "--config.allocation_mode=jax:d1+fsdp:f2"),
    "jax": (
        *("--topology=cpu:4", "--devices_per_host=2", "--config.allocation_mode=jax:d1+jax:f3"),
        "--env=XLA_FLAGS=--xla_force_host_platform_device_count=2",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mode", "script"), [("fsdp", "hosts.sh"), ("jax", "hosts.sh"), ("fsdp", "torchrun.sh")])
def test_a_run_on_two_hosts_trains_to_its_end(tmp_path, mode, script):
    """Hosts are processes here: two that train, and with a learner of ranks one that serves."""
    done = launch(tmp_path, *SMALL, *RUNS[mode], f"--python={sys.executable}")
    assert done.returncode == 0, done.stderr
    folder, here = tmp_path / "launch", "127.0.0.1"
    ports = {"MASTER_PORT": str(free_port(here)), "SERVER_PORT": str(free_port(here))}
    serves = bool(json.loads((folder / "job.json").read_text())["serve"])
    addresses = [here] * (3 if serves else 2)

    def start(name, *arguments):
        return subprocess.Popen(["bash", folder / name, *arguments], env=os.environ | ports, start_new_session=True)

    server = start("hosts.sh", "2", *addresses) if serves else None
    torchrun = (here, f"{here}:{ports['SERVER_PORT']}")
    hosts = [start(script, *(torchrun if script == "torchrun.sh" else (str(i), *addresses))) for i in range(2)]
    try:
        assert [host.wait(600) for host in hosts] == [0, 0]
        assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"
        assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 9
    finally:
        for process in [*hosts, *([server] if server else [])]:
            process.terminate()
        if server is not None:
            assert server.wait(60) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_places_a_run_on_three_nodes_starts_it_again_when_a_rank_is_killed_and_has_it_saved(tmp_path):
    pytest.importorskip("ray", reason="needs ray (pip install 'rljax[ray]')")
    from ray.cluster_utils import Cluster

    endless = ("--config.total_train_steps=100000", "--config.total_train_epochs=100000", "--config.saver.freq_steps=4")
    done = launch(tmp_path, *SMALL, *endless, *RUNS["fsdp"], f"--python={sys.executable}", "--name=trial")
    assert done.returncode == 0, done.stderr
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "rljax.launching.on_ray", str(tmp_path / "launch/job.json")]
    with (tmp_path / "driver.log").open("w") as log:
        driver = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=log, stdout=log)
    try:
        wait_for_steps(tmp_path / "run", 10, driver)
        for process in ranks_of(tmp_path / "run", 1):
            os.kill(process, signal.SIGKILL)
        until = time.monotonic() + 120
        while "training ended with status 1" not in (tmp_path / "driver.log").read_text():
            assert time.monotonic() < until and driver.poll() is None
            time.sleep(0.5)
        wait_for_steps(tmp_path / "run", len(lines_of(tmp_path / "run")) + 6, driver)
        driver.terminate()
        assert driver.wait(120) == 128 + signal.SIGTERM
    finally:
        driver.kill()
        cluster.shutdown()
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["state"] == "stopped" and status["step"] == len(lines_of(tmp_path / "run"))


def lines_of(run):
    path = run / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_steps(run, steps, process):
    until = time.monotonic() + 300
    while len(lines_of(run)) < steps:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.5)


def ranks_of(run, rank):
    """Yields the processes of a rank of this run."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            variables = (directory / "environ").read_bytes().split(b"\0")
            arguments = (directory / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and f"--workdir={run}".encode() in arguments and b"train" in arguments:
            yield int(directory.name)
