"""Processes on one host of a job: ranks, servers, signals, failures, and a token that all hosts share."""

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljax.errors import UserError
from rljax.launching import host
from rljax.launching.host import Place, run
from rljax.messaging.token import VARIABLE
from tests.unit.launching.jobs import made, stand_in

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job of two hosts of two processes that train and one that serves; its program is the stand-in."""
    (tmp_path / "run").mkdir()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("RECORDS", str(tmp_path))
    found = made("sglang:d2+fsdp:f4", "h100:4", 2, where={"environment": {"NCCL_DEBUG": "INFO"}})
    code = stand_in(tmp_path / "code")
    return dataclasses.replace(found, workdir=str(tmp_path / "run"), directory=str(code), python=sys.executable)


def records(tmp_path, name):
    return [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]


def test_hosts_start_their_processes_with_ranks_addresses_and_one_token(job, tmp_path):
    assert run(job, "serve", Place(0, "head", "one", server_port=31000)) == 0
    for number in range(2):
        assert run(job, "train", Place(number, "head", "one", ("server",))) == 0
    started = [records(tmp_path, f"train-{rank}")[0] for rank in range(4)]
    (server, *_) = records(tmp_path, "serve-0")
    tokens = {each["environment"][VARIABLE] for each in (server, *started)}
    assert tokens == {(tmp_path / "run/servers/token").read_text().strip()}
    assert stat.S_IMODE((tmp_path / "run/servers/token").stat().st_mode) == 0o600
    for rank, each in enumerate(started):
        assert each["directory"] == job.directory and each["environment"]["NCCL_DEBUG"] == "INFO"
        wanted = {"LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head"}
        assert wanted.items() <= each["environment"].items()
        assert each["argv"][0] == "train" and "--config.rollout.addr=server:30000" in each["argv"]
        assert f"--workdir={job.workdir}" in each["argv"] and not any(token in " ".join(each["argv"]) for token in tokens)
    assert "RANK" not in server["environment"] and "--config.serve.port=31000" in server["argv"]


def test_a_process_that_fails_ends_the_others_and_its_status_is_the_hosts(job, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "KILL_AFTER", 0.1)
    (tmp_path / "train-2.does").write_text("wait")
    (tmp_path / "train-3.does").write_text("7")
    assert run(job, "train", Place(1, "head", "one", ("server",))) == 7


def test_a_server_that_ends_is_started_again(job, tmp_path):
    (tmp_path / "serve-0.does").write_text("3")
    assert run(dataclasses.replace(job, restarts=1), "serve", Place(0, "head", "one")) == 3
    assert len(records(tmp_path, "serve-0")) == 2


def started(job, tmp_path, *arguments, **variables):
    (tmp_path / "job.json").write_text(job.to_json())
    command = [sys.executable, "-m", "rljax.launching", str(tmp_path / "job.json"), *arguments]
    return subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, env=os.environ | variables)


def wait_for(path):
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_processes_and_is_not_taken_for_the_end_of_the_run(job, tmp_path, sent):
    """SIGUSR1 as Slurm sends it: to all processes of the host. They are told once."""
    for rank in (2, 3):
        (tmp_path / f"train-{rank}.does").write_text("wait")
    process = started(job, tmp_path, "--host=NODE", "--head=h", "--servers=s", NODE="1")
    for rank in (2, 3):
        wait_for(tmp_path / f"train-{rank}.jsonl")
    if sent == signal.SIGUSR1:
        for child in children_of(process):
            os.kill(child, sent)
    process.send_signal(sent)
    told = signal.SIGTERM if sent == signal.SIGUSR1 else sent
    assert process.wait(60) == 128 + told
    process.stderr.close()
    assert {(tmp_path / f"train-{rank}.signals").read_text() for rank in (2, 3)} == {str(int(told))}


def children_of(process):
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def test_processes_end_with_a_host_that_is_killed(job, tmp_path):
    (tmp_path / "serve-0.does").write_text("wait")
    process = started(job, tmp_path, "--side=serve")
    wait_for(tmp_path / "serve-0.jsonl")
    children = children_of(process)
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert children


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--host=2", "--servers=s"], "--host: 2 is none of the 2 hosts of side train"),
        (["--servers=s,t"], "--servers: 2 addresses, and the job has 1 hosts to serve"),
        (["--side=learn"], "--side: 'learn': this job has train and serve"),
        (["--host=NOWHERE"], "--host: 'NOWHERE' is no number"),
    ],
)
def test_a_host_that_the_job_does_not_have_is_refused_in_one_line(job, tmp_path, arguments, line, monkeypatch, capsys):
    from rljax.launching.__main__ import main

    (tmp_path / "job.json").write_text(job.to_json())
    monkeypatch.setattr(sys, "argv", ["launching", str(tmp_path / "job.json"), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and capsys.readouterr().err.startswith(f"error: {line}")


def test_a_token_that_others_can_read_is_refused(job, tmp_path):
    (tmp_path / "run/servers").mkdir()
    (tmp_path / "run/servers/token").write_text("known")
    (tmp_path / "run/servers/token").chmod(0o644)
    with pytest.raises(UserError, match="others can read"):
        run(job, "serve", Place(0, "head", "one"))
