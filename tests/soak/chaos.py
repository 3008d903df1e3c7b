"""A run under everything at once: kills, stops, a full and a slow disk, garbage, clock jumps.

    python -m tests.soak.chaos [--minutes=60] [--seed=1] [--directory=DIR]

A trainer, two sampling servers and three workers of the fake engine, on a small disk of their own
where one can be mounted. Whatever dies is started again. A run after the other until the time is
up; each is then finished in peace and checked by chaos_check.py. Exit status 1 if anything is wrong.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from rljax.messaging.listener import MAX_UNPROVED
from rljax.messaging.web_server import MAX_STRANGERS

ROOT = Path(__file__).resolve().parents[2]
EPOCHS, PROMPTS, SAMPLES, LAG, BATCH = 2, 300, 2, 2, 4
SERVERS, WORKERS = 2, 3
DISK_MB = 96
TURBULENT = 300.0  # seconds of one run; after that it may finish in peace
LIMIT = 600.0  # seconds for that
SILENT = 60  # connections at once that say nothing
GARBAGE = (
    lambda dice: dice.randbytes(dice.randint(1, 4096)),
    lambda dice: b"GET /" + dice.randbytes(20).hex().encode() + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda dice: b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"text":[',
    lambda dice: b"\x00\x00\x00\xff" * 64,
    lambda dice: b"",
)


class Disk:
    """A small disk, if one can be mounted; filling it is filling what the run has."""

    def __init__(self, path):
        path.mkdir(parents=True)
        self.path, self._filler = path, path / "filler"
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(path)]
        self.mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0

    @property
    def full(self):
        return self._filler.exists()

    def fill(self):
        if self.mounted:
            with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * (1 << 16))

    def empty(self):
        self._filler.unlink(missing_ok=True)

    def close(self):
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=False)


class Chaos:
    """One run, and all that befalls it."""

    def __init__(self, directory, seed):
        self.directory, self.dice, self.hits = directory, random.Random(seed), Counter()
        directory.mkdir(parents=True)
        self.disk = Disk(directory / "disk")
        self.workdir = self.disk.path / "run"
        self.workdir.mkdir()
        self.clock = directory / "clock"
        self.clock.write_text("0")
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + SERVERS)]
        self.door, *self.ports = [s.getsockname()[1] for s in held]
        for s in held:
            s.close()
        self.processes = {("server", port): None for port in self.ports} | {("worker", i): None for i in range(WORKERS)}
        self.trainer, self.killed, self.was_full, self.began_at = None, False, False, 0
        self.silent, self.wake = [], []  # connections that say nothing; (when, process) of those that are stopped
        self.strangers = set()  # (port here, port of the door) of what this process has connected
        settings = {"epochs": EPOCHS, "prompts": PROMPTS, "samples": SAMPLES, "lag": LAG, "batch": BATCH}
        settings["unproved"] = {"trainer": MAX_UNPROVED + 1, "server": MAX_STRANGERS + 1}  # and the one that waits for room
        (directory / "settings.json").write_text(json.dumps(settings))

    # Processes

    def start(self, module, *arguments):
        environment = os.environ | {"CHAOS_CLOCK": str(self.clock), "CHAOS_FSYNC": "0.1"}
        command = [sys.executable, "-m", "tests.soak.shim", f"tests.soak.{module}", *map(str, arguments)]
        with (self.directory / f"{module}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)

    def start_partner(self, key):
        kind, number = key
        place = self.directory / "partners"  # on another disk: a server that can't make its model would never start
        place.mkdir(exist_ok=True)
        port, seed = (number, self.dice.randrange(10**6)) if kind == "server" else (self.door, number)
        workdir = place if kind == "server" else self.workdir
        self.processes[key] = self.start("partner", kind, workdir, port, seed)

    def start_trainer(self):
        for port in self.ports:  # a trainer attaches only to running ones
            self.wait_for(port)
        settings = {
            "epochs": EPOCHS, "prompts": PROMPTS, "lag": LAG, "seed": self.dice.randrange(10**6),
            "addr": ",".join(f"127.0.0.1:{port}" for port in self.ports), "listen": f"127.0.0.1:{self.door}",
            "ledger": str(self.directory / "ledger.jsonl"),
        }  # fmt: skip
        self.killed, self.was_full, self.began_at = False, self.disk.full, self.progress()
        self.trainer = self.start("chaos_trainer", self.workdir, json.dumps(settings))

    def progress(self):
        """Bytes of the ledger: steps made."""
        ledger = self.directory / "ledger.jsonl"
        return ledger.stat().st_size if ledger.exists() else 0

    def wait_for(self, port):
        until = time.monotonic() + 120
        while time.monotonic() < until:
            self.tend()
            with contextlib.suppress(OSError):
                return self.connect(port).close()
            time.sleep(0.1)
        raise SystemExit(f"a server never listened at {port}")

    def tend(self):
        """Starts again what has died, and wakes what has slept enough."""
        for key, process in self.processes.items():
            if process is None or process.poll() is not None:
                self.start_partner(key)
        now = time.monotonic()
        for when, process in list(self.wake):
            if now >= when:
                self.wake.remove((when, process))
                with contextlib.suppress(OSError):
                    process.send_signal(signal.SIGCONT)

    # What befalls it

    def strike(self):
        name = self.dice.choice(
            ["kill_trainer", *["kill_partner"] * 2, *["stop"] * 3, *["garbage"] * 4, "fill_disk", "jump", "silence"]
        )
        self.hits[name] += 1
        getattr(self, name)()

    def kill_trainer(self):
        if self.progress() > self.began_at:  # before its first step a kill would test nothing
            self.killed = True
            self.trainer.kill()

    def kill_partner(self):
        self.processes[self.dice.choice(list(self.processes))].kill()

    def stop(self):
        process = self.dice.choice([self.trainer, *self.processes.values()])
        with contextlib.suppress(OSError):
            process.send_signal(signal.SIGSTOP)
        self.wake.append((time.monotonic() + self.dice.uniform(0.1, 4.0), process))

    def garbage(self):
        with contextlib.suppress(OSError), self.connect(self.some_door()) as door:
            door.sendall(self.dice.choice(GARBAGE)(self.dice))

    def silence(self):
        while len(self.silent) > SILENT or (self.silent and self.dice.random() < 0.7):
            self.silent.pop(0).close()
        for _ in range(self.dice.randint(1, 12)):
            with contextlib.suppress(OSError):
                self.silent.append(self.connect(self.some_door()))

    def connect(self, port):
        """Connects as a stranger, whom `sample` knows by both ports."""
        connection = socket.create_connection(("127.0.0.1", port), timeout=1)
        self.strangers.add((connection.getsockname()[1], port))
        return connection

    def some_door(self):
        return self.dice.choice([self.door, *self.ports])

    def fill_disk(self):
        if self.progress() == self.began_at:
            return
        self.was_full = True
        self.disk.fill()
        time.sleep(self.dice.uniform(0.2, 2.0))
        self.disk.empty()

    def jump(self):
        self.clock.write_text(str(self.dice.choice([0, -3600, 3600, 86400, -1])))

    # The run

    def run(self, turbulent):
        """Runs to the end. Returns what the checker says."""
        began, sampled = time.monotonic(), 0.0
        try:
            self.tend()
            self.start_trainer()
            while True:
                self.tend()
                now = time.monotonic()
                if self.trainer.poll() is not None:
                    if self.ended() == 0:
                        break
                    self.start_trainer()
                elif now - began < turbulent:
                    self.strike()
                elif now - began > turbulent + LIMIT:
                    self.killed = True
                    self.trainer.kill()
                    self.trainer.wait()
                    self.ended()
                    break
                if now - sampled > 1:
                    sampled = now
                    self.sample()
                time.sleep(self.dice.uniform(0.1, 0.8))
        finally:
            self.close()
        check = [sys.executable, str(Path(__file__).with_name("chaos_check.py")), str(self.directory)]
        return subprocess.run(check, capture_output=True, text=True, check=False).stdout.splitlines()

    def ended(self):
        """Records how a trainer ended. Returns its exit status."""
        status = None
        with contextlib.suppress(OSError, ValueError):
            status = json.loads((self.workdir / "status.json").read_text())
        code = self.trainer.returncode
        ending = {"code": code, "killed": self.killed and code < 0, "disk_full": self.was_full, "status": status}
        with (self.directory / "endings.jsonl").open("a") as file:
            file.write(json.dumps(ending) + "\n")
        self.hits["ended by itself"] += not ending["killed"]
        return code

    def sample(self):
        with (self.directory / "samples.jsonl").open("a") as file:
            for key, process in [(("trainer", 0), self.trainer), *self.processes.items()]:
                with contextlib.suppress(psutil.Error):
                    seen = psutil.Process(process.pid)
                    peers = [(c.raddr.port, c.laddr.port) for c in seen.net_connections("tcp4") if c.raddr]
                    strangers = sum(ports in self.strangers for ports in peers)
                    used = {"files": seen.num_fds() - strangers, "strangers": strangers, "bytes": seen.memory_info().rss}
                    line = {"name": f"{key[0]} {key[1]}", "pid": process.pid} | used
                    file.write(json.dumps(line) + "\n")

    def close(self):
        for process in [self.trainer, *self.processes.values()]:
            if process is not None:
                process.kill()
                process.wait()
        for connection in self.silent:
            connection.close()
        self.disk.close()


def chaos(directory, minutes, seed):
    """Runs for some minutes. Returns violations, and what befell the runs."""
    began, hits, found = time.monotonic(), Counter(), []
    while (left := minutes * 60 - (time.monotonic() - began)) > 0:
        run = Chaos(directory / str(hits["runs"]), seed + hits["runs"])
        said = run.run(min(TURBULENT, left))
        found += [f"run {hits['runs']}: {line}" for line in said]
        hits += run.hits + Counter(runs=1)
    return found, hits


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its processes and its disk go with it
    directory = given.directory or Path(tempfile.mkdtemp(prefix="rljax-chaos-"))
    found, hits = chaos(directory, given.minutes, given.seed)
    print(f"{dict(hits)}; logs in {directory}")
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
