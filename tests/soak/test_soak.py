"""A soak test: delays, lost requests, failed rewards; random kills of trainer, servers and workers.

At the end each prompt was trained on exactly once, no token was older than the bound, and neither
open files nor memory have grown.

    pytest tests/soak               a minute or two
    pytest tests/soak -m slow -s    ten minutes
"""

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from rljax import loop
from rljax.testing.harness import make_run

ROOT = Path(__file__).resolve().parents[2]


def _ports(n):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


def _start(module, *arguments):
    command = [sys.executable, "-m", f"tests.soak.{module}", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE if module == "trainer" else None, text=True)


@dataclasses.dataclass
class Partners:
    """Servers and workers of one soak, each restarted when it is killed."""

    workdir: Path
    dice: random.Random
    servers: int = 0
    workers: int = 0

    def __post_init__(self):
        self.worker_port, *self.ports = _ports(1 + self.servers)
        self.killed = Counter()
        self.processes = {("server", port): None for port in self.ports}
        self.processes |= {("worker", index): None for index in range(self.workers)}
        for key in self.processes:
            self._start(key)
        self.wait_for_servers()

    @property
    def settings(self):
        """Returns the trainer's settings for them."""
        listen = f"127.0.0.1:{self.worker_port}" if self.workers else ""
        return {"addr": ",".join(f"127.0.0.1:{port}" for port in self.ports), "listen": listen}

    def _start(self, key):
        kind, number = key
        port, seed = (number, self.dice.randrange(10**6)) if kind == "server" else (self.worker_port, number)
        self.processes[key] = _start("partner", kind, self.workdir, port, seed)

    def kill_one(self):
        """Kills one of any kind, and starts another in its place."""
        if self.processes:
            key = self.dice.choice(list(self.processes))
            self.processes[key].kill()
            self.processes[key].wait()
            self.killed[key[0]] += 1
            self._start(key)

    def wait_for_servers(self):
        """Waits until all servers answer, as a trainer attaches only to running ones."""
        for port in self.ports:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.02)

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def _soak(workdir, *, epochs, prompts, kills, seed, lag=2, servers=0, workers=0):
    """Runs the trainer, killing it `kills` times, and partners in between.

    Returns the trainer's report, and the number of kills of each kind.
    """
    dice = random.Random(seed)
    workdir.mkdir(exist_ok=True)
    partners = Partners(workdir, dice, servers, workers)
    try:
        for attempt in range(10_000):  # every process but the last is killed
            partners.wait_for_servers()
            settings = {"epochs": epochs, "prompts": prompts, "seed": seed + attempt, "lag": lag} | partners.settings
            process = _start("trainer", workdir, json.dumps(settings))
            _wait_until_it_writes(workdir, process)
            partners.kill_one()
            if attempt < kills:
                time.sleep(dice.uniform(0.0, 0.6))
                process.send_signal(signal.SIGKILL)
            _, errors = process.communicate()
            if process.returncode == 0:
                report = json.loads((workdir / "done.json").read_text())
                return report | {"partners_hold": _open_files(partners)}, partners.killed + Counter(trainer=attempt)
            assert process.returncode == -signal.SIGKILL, errors
        raise AssertionError("never done")
    finally:
        partners.close()


def _open_files(partners):
    """Open files of each server and worker at the end."""
    return [psutil.Process(process.pid).num_fds() for process in partners.processes.values()]


def _wait_until_it_writes(workdir, process):
    """Waits until the process has written something, for before that a kill would test nothing."""
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
    if report["steps_of_the_last"] >= 40:  # else half of them say little
        assert report["files_grown"] <= 16  # connections to servers and workers come and go
        assert report["bytes_grown"] < 16 << 20
    assert all(files < 100 for files in report["partners_hold"])


def test_exactly_once_through_faults_and_kills(tmp_path):
    report, hits = _soak(tmp_path, epochs=2, prompts=90, kills=6, seed=1)
    assert hits["trainer"]  # else no kill came before the end
    _check(report, epochs=2, prompts=90)


def test_exactly_once_through_kills_of_servers(tmp_path):
    report, hits = _soak(tmp_path, epochs=2, prompts=60, kills=3, seed=2, servers=2)
    assert hits["trainer"] and hits["server"]
    _check(report, epochs=2, prompts=60)


def test_exactly_once_through_kills_of_workers(tmp_path):
    report, hits = _soak(tmp_path, epochs=2, prompts=60, kills=3, seed=3, workers=3)
    assert hits["trainer"] and hits["worker"]
    _check(report, epochs=2, prompts=60)


def _lines(path):
    """Returns the last line of each step, without values that depend on the machine's speed.

    A file that is cut at each resumption would hold the same lines.
    """
    lines = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        lines[line["step"]] = {k: v for k, v in line.items() if not k.startswith(("timeperf/", "perf/", "rollout/wait/"))}
    return lines


def test_resume_equivalence_of_synchronous_runs_killed_many_times(tmp_path):
    for name, kills in (("straight", 0), ("killed", 4)):
        report, hits = _soak(tmp_path / name, epochs=2, prompts=60, kills=kills, seed=7, lag=0)
        assert (hits["trainer"] > 0) == (kills > 0) and report["most_lag"] == 0
    assert _lines(tmp_path / "killed" / "metrics.jsonl") == _lines(tmp_path / "straight" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_exactly_once_through_ten_minutes_of_faults_and_kills(tmp_path):
    """Runs several soaks: the trainer's own sampler, servers, workers, and both of these."""
    start, hits, steps, most = time.monotonic(), Counter(), 0, {"files_grown": 0, "bytes_grown": 0}
    beside = [{}, {"servers": 2}, {"workers": 3}, {"servers": 2, "workers": 2}]
    for n in range(10_000):
        if time.monotonic() - start > 540 and n >= len(beside):
            break
        seed = 100 + 1000 * n
        report, killed = _soak(tmp_path / str(seed), epochs=2, prompts=300, kills=12, seed=seed, **beside[n % len(beside)])
        _check(report, epochs=2, prompts=300)
        hits, steps = hits + killed + Counter(soaks=1), steps + report["step"]
        most = {name: max(value, report[name]) for name, value in most.items()}
    took, prompts = time.monotonic() - start, 4 * steps
    print(f"{steps} steps, {prompts} prompts in {took:.0f} s; soaks and kills: {dict(hits)}; grown at most: {most}")


def test_a_long_run_keeps_no_file_and_no_memory(tmp_path):
    """Open files and memory in use are the same after many steps as after few."""
    process, seen = psutil.Process(), []

    class Watching:
        def __call__(self, first_step):
            from rljax.testing.harness import MemorySink

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
    assert max(files[240:]) <= max(files[:240]) + 1  # a batch may be on its way to the disk
    assert memory[-1] - memory[240] < 8 << 20  # bytes; a group a step kept for good would be more
