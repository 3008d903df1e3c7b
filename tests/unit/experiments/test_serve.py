"""A server that outlives two runs which attach to it, each a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.engines.http.remote import fetch
from rljax.testing.models import make_model

REPOSITORY = Path(__file__).resolve().parents[3]
TOKEN = "sesame"
QUICK = ("--config=configs/quickstart.py", "--config.allocation_mode=fake", "--config.rollout.request_timeout=60")


def command(binary: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", f"experiments.{binary}", *QUICK, *flags]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("RLJAX_TOKEN", TOKEN)
    process = subprocess.Popen(
        command("serve", f"--workdir={tmp_path / 'serve'}"),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert " at 127.0.0.1:" in line, process.communicate()[1]
    yield process, line.split()[-1]
    process.kill()
    process.communicate()


def test_runs_attach_to_a_server_one_after_the_other(server, tmp_path):
    process, address = server
    steps = 3
    for run in ("first", "second"):
        workdir = tmp_path / run
        flags = [f"--config.total_train_steps={steps}", "--config.warmup.steps=0", f"--config.rollout.addr={address}"]
        flags += ["--config.evaluator.freq_steps=None", "--config.stats_logger.live=False", "--config.saver.export_final=False"]
        subprocess.run(command("train", *flags, f"--workdir={workdir}"), cwd=REPOSITORY, check=True, timeout=120)
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        assert all(line["rollout/staleness/max"] <= 2 for line in lines)
        assert fetch(f"http://{address}", "/get_model_info", TOKEN, 10)["weight_version"] == str(steps)
    assert [model["id"] for model in fetch(f"http://{address}", "/v1/models", TOKEN, 10)["data"]] == ["init"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_what_a_run_has_learned_is_served(tmp_path):
    make_model(tmp_path / "export")
    process = subprocess.Popen(command("serve", f"--workdir={tmp_path}"), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    process.kill()
    process.communicate()
    assert line.startswith(f"serving {tmp_path / 'export'} at ")


def test_a_port_in_use_is_one_line_and_status_one(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            command("serve", f"--config.serve.port={port}", f"--workdir={tmp_path}"),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: serve.port: cannot listen on 127.0.0.1")


def test_a_server_that_is_not_there_is_named(tmp_path):
    done = subprocess.run(
        command("rollout", "--config.rollout.addr=127.0.0.1:1", f"--out={tmp_path}"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: rollout.addr: http://127.0.0.1:1")
