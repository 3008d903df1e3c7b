"""A soak: delays, lost requests, failed rewards, publishes whenever they come, and kill -9 of the trainer at random instants.

At the end every prompt was trained on exactly once, no token was older than the bound, and nothing was left open.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljax import loop
from rljax.engines.fake.trial import make_run

ROOT = Path(__file__).resolve().parents[2]


def _soak(workdir, *, epochs, prompts, kills, seed, lag=2):
    """Runs the trainer, killing it `kills` times; returns its report and the number of kills that hit."""
    dice = random.Random(seed)
    for attempt in range(10_000):  # every process but the last is killed
        numbers = (epochs, prompts, seed + attempt, lag)
        command = [sys.executable, "-m", "tests.soak.trainer", str(workdir), *map(str, numbers)]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        if attempt < kills:
            _until_it_moves(workdir, process)
            time.sleep(dice.uniform(0.0, 0.6))
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        if process.returncode == 0:
            return json.loads((workdir / "done.json").read_text()), attempt
        assert process.returncode == -signal.SIGKILL, errors
    raise AssertionError("never done")


def _until_it_moves(workdir, process):
    """Until the process has written something: a kill before that tests only Python's start."""
    metrics = workdir / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > before):
        time.sleep(0.01)


def _check(report, *, epochs, prompts):
    assert {uid: len(steps) for uid, steps in report["trained"].items()} == {
        f"{epoch}/{index}": 1 for epoch in range(epochs) for index in range(prompts)
    }
    assert 0 < report["most_lag"] <= 2
    assert report["step"] == -(-epochs * prompts // 4)
    assert report["files_left"] <= 0


def test_two_epochs_through_faults_and_kills_law_5(tmp_path):
    report, hits = _soak(tmp_path, epochs=2, prompts=90, kills=6, seed=1)
    assert hits  # else no kill came before the end
    _check(report, epochs=2, prompts=90)


def _lines(path):
    """The last line of each step, as a file that is cut at each resumption would hold; less what the machine's time is in."""
    lines = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        lines[line["step"]] = {k: v for k, v in line.items() if not k.startswith(("timeperf/", "rollout/wait/"))}
    return lines


def test_killed_synchronous_runs_write_the_metrics_of_one_that_was_not_law_10(tmp_path):
    for name, kills in (("straight", 0), ("killed", 4)):
        report, hits = _soak(tmp_path / name, epochs=2, prompts=60, kills=kills, seed=7, lag=0)
        assert (hits > 0) == (kills > 0) and report["most_lag"] == 0
    assert _lines(tmp_path / "killed" / "metrics.jsonl") == _lines(tmp_path / "straight" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_minutes_of_faults_and_kills_law_5(tmp_path):
    start, seed = time.monotonic(), 100
    while time.monotonic() - start < 600:
        report, _ = _soak(tmp_path / str(seed), epochs=2, prompts=400, kills=40, seed=seed)
        _check(report, epochs=2, prompts=400)
        seed += 1000


def test_a_long_run_keeps_no_file_and_no_memory(tmp_path):
    """Open files and the memory in use after many steps are those after few."""
    import psutil

    process, seen = psutil.Process(), []

    class Watching:
        def __call__(self, first_step):
            from rljax.engines.fake.trial import MemorySink

            class Sink(MemorySink):
                def write(self, step, metrics):
                    seen.append((len(os.listdir("/proc/self/fd")), process.memory_info().rss))

            return Sink(first_step)

    overrides = {
        "rollout.max_head_offpolicyness": 2, "total_train_epochs": 12, "saver.freq_steps": 20, "gconfig.n_samples": 2,
    }  # fmt: skip
    loop.train(make_run(tmp_path, overrides, n_prompts=160, sink=Watching()))
    assert len(seen) == 480
    files, memory = zip(*seen, strict=True)
    assert max(files[240:]) <= max(files[:240])
    assert memory[-1] - memory[240] < 8 << 20  # bytes; a group a step kept for good would be more
