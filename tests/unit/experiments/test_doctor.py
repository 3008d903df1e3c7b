"""The doctor as a program: verdicts, exit statuses, and one line for bad input."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljax.config import io as config_io
from tests.unit.diagnosis import made

REPOSITORY = Path(__file__).resolve().parents[3]


def write(workdir: Path, columns, state: str = "finished") -> Path:
    workdir.mkdir()
    with (workdir / "metrics.jsonl").open("w") as file:
        for at in range(len(next(iter(columns.values())))):
            found = {name: float(values[at]) for name, values in columns.items() if np.isfinite(values[at])}
            file.write(json.dumps({"step": at + 1} | found) + "\n")
    (workdir / "config.json").write_text(config_io.to_json(made.config()))
    (workdir / "context.json").write_text(json.dumps({"sessions": [made.SESSION]}))
    (workdir / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made.samples()))
    (workdir / "status.json").write_text(json.dumps({"state": state, "step": made.STEPS}))
    return workdir


def clipped():
    return made.healthy() | {"ppo_actor/update/clip_ratio": np.where(np.arange(made.STEPS) >= 30, 0.7, 0.02)}


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.doctor", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_a_healthy_run_exits_with_0_and_a_broken_one_with_2(tmp_path):
    healthy, broken = write(tmp_path / "healthy", made.healthy()), write(tmp_path / "broken", clipped())
    done = doctor(f"--workdir={healthy}")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "HEALTHY: no link is broken")
    done = doctor(f"--workdir={broken}", "--json")
    first = json.loads(done.stdout)["first_break"]
    assert done.returncode == 2 and (first["rule"], first["link"], first["step"]) == ("policy.clip_ratio", "policy", 31)
    done = doctor(f"--workdir={healthy},{broken}")
    assert done.returncode == 2 and "1 of 2 runs" in done.stdout


def test_a_failed_run_exits_with_2_and_the_reason_even_before_its_first_step(tmp_path):
    run = write(tmp_path / "run", made.healthy())
    (run / "status.json").write_text(json.dumps({"state": "failed", "error": "guard.collapse: all rewards are 0"}))
    early = tmp_path / "early"
    early.mkdir()
    (early / "status.json").write_text(json.dumps({"state": "failed", "error": "no such model: x"}))
    for workdir, reason in ((run, "guard.collapse: all rewards are 0"), (early, "no such model: x")):
        done = doctor(f"--workdir={workdir}", "--checklist")
        assert (done.returncode, done.stdout.splitlines()[0]) == (2, f"FAILED: {reason}")
        assert "HEALTHY" not in done.stdout


def test_a_run_without_steps_exits_with_0_and_is_not_called_healthy(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    done = doctor(f"--workdir={tmp_path}", "--checklist")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "NOT JUDGED: no RL steps")
    assert "HEALTHY" not in done.stdout and "[x]" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ([], "--workdir: missing"),
        (["--workdir=none"], "--workdir: no such directory"),
        (["--log=none.csv"], "--log: no such file"),
        (["--log="], "--log: missing"),
        (["--workdir=a", "--audit="], "--audit: missing"),
        (["--diff", "one"], "--diff: takes two"),
        (["--diff", "one", "two"], "--diff: no such directory: one"),
        (["--workdir=a,b/../a"], "--workdir: a run is named twice"),
        (["--workdir=x", "more"], "more: unexpected argument"),
        (["--workdir=a,b", "--audit=out"], "--audit: has no meaning with several runs"),
        (["--workdir=a", "--score=os.path:join"], "--score: has no meaning without --audit"),
        (["--workdir=a", "--rescore", "--critic"], "--critic: excludes --rescore"),
        (["--log=x.csv", "--checklist"], "--checklist: has no meaning with --log"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_1(arguments, culprit):
    done = doctor(*arguments)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and culprit in done.stderr


@pytest.mark.parametrize("arguments", [["--json"], [], ["--help"]])
def test_a_reader_that_is_gone_ends_it_without_a_word(tmp_path, arguments):
    run = write(tmp_path / "run", clipped())
    read, pipe = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "experiments.doctor", f"--workdir={run}", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_everything_about_one_run_at_once(tmp_path):
    run = write(tmp_path / "run", made.healthy())
    out = tmp_path / "audit"
    done = doctor(f"--workdir={run}", "--checklist", f"--audit={out}", "--score=os.path:join")
    assert done.returncode == 1 and "--score" in done.stderr  # it returns no number
    done = doctor(f"--workdir={run}", "--checklist", f"--audit={out}", "--json")
    tree = json.loads(done.stdout)
    assert done.returncode == 0 and (out / "audit.md").exists() and tree["checklist"]


def test_watch_says_the_verdict_when_it_changes_and_ends_with_the_run(tmp_path):
    run = write(tmp_path / "run", made.healthy(), state="running")
    command = [sys.executable, "-m", "experiments.doctor", f"--workdir={run}", "--watch", "--interval=0.1", "--json"]
    watching = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    assert json.loads(watching.stdout.readline())["first_break"] is None
    worse = write(tmp_path / "worse", clipped(), state="running")
    (worse / "metrics.jsonl").rename(run / "metrics.jsonl")
    assert json.loads(watching.stdout.readline())["first_break"]["rule"] == "policy.clip_ratio"
    (run / "status.json").write_text(json.dumps({"state": "failed", "step": made.STEPS}))
    assert json.loads(watching.stdout.readline())["standing"] == "FAILED"
    assert watching.stdout.readline() == "" and watching.wait(60) == 2


@pytest.mark.parametrize("has_steps", [True, False])
def test_watch_ends_with_a_run_that_is_killed(tmp_path, has_steps):
    """Whose status.json goes on saying that it runs."""
    run = write(tmp_path / "run", made.healthy())
    waits = "import pathlib, sys, time; from rljax.sinks import *; from rljax.sinks.run_directory import RunDirectory\n"
    waits += "run = RunDirectory(pathlib.Path(sys.argv[1])); run.write_status(Status(RunState.RUNNING, step=80, version=80))\n"
    waits += "print('running', flush=True); time.sleep(60)"
    if not has_steps:
        (run / "metrics.jsonl").unlink()
    training = subprocess.Popen([sys.executable, "-c", waits, str(run)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None and training.stdout.readline() == "running\n"
    command = [sys.executable, "-m", "experiments.doctor", f"--workdir={run}", "--watch", "--interval=0.1"]
    watching = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    if has_steps:
        assert watching.stdout is not None and "HEALTHY" in watching.stdout.readline()
    training.kill()
    said, _ = watching.communicate(timeout=60)
    training.wait()
    assert watching.returncode == 2 and f"FAILED: its process ({training.pid} on " in said
    assert json.loads((run / "status.json").read_text())["state"] == "running"
