"""Starts SGLang servers on this machine, one per data-parallel replica, and stops them."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engine import private_directory, remove_private
from rljax.engine.rank import LOOPBACK, free_port
from rljax.engines.http import reaper
from rljax.engines.http.config import SglangConfig
from rljax.engines.http.remote import SPANS_AND_INTERVALS, Remote, ServerLost, fetch, inspect
from rljax.errors import UserError
from rljax.hf.read_model import check_stored
from rljax.process.environment import without_secrets

KEY_VARIABLE = "RLJAX_SERVER_KEY"  # environment variable of a server's key; other users can read command lines, not this
# SGLang takes its key as an argument; given here, it is in no command line. Otherwise this is `python -m sglang.launch_server`
_BOOT = f"""
import os, runpy, sys
sys.argv[1:1] = ["--api-key=" + os.environ.pop("{KEY_VARIABLE}")]  # it may begin with a hyphen
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
GRACE = 3.0  # seconds between SIGTERM and SIGKILL: SGLang would finish its requests first
PORT_ATTEMPTS = 3  # another process may take a free port before the server binds it
TAIL = 30  # lines of a log shown in an error
LAUNCHER_VARIABLES = (  # torchrun's variables, beside those that begin with TORCHELASTIC_
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
_EXPECTED = "bin/python of the environment with SGLang"
_NO_ACCELERATOR = re.compile(r"no accelerator .*available|found no nvidia driver|no cuda gpus are available", re.IGNORECASE)
_PORT_TAKEN = re.compile(r"address already in use|port \d+ is (not available|in use)", re.IGNORECASE)


@dataclasses.dataclass
class Process:
    """A server's process, which runs under a reaper (reaper.py)."""

    reaper: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def base(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def tail(self) -> str:
        """Returns the last lines of its log; "" if somebody removed it."""
        try:
            with self.log.open(errors="replace") as lines:
                return "".join(collections.deque(lines, TAIL)).rstrip()
        except OSError:
            return ""

    def stop(self) -> None:
        """Stops the server; returns when it and all its children are gone."""
        assert self.reaper.stdin is not None
        self.reaper.stdin.close()
        try:
            self.reaper.wait(GRACE + 10)
        except subprocess.TimeoutExpired:
            self.reaper.kill()
            self.reaper.wait()


class SglangServers:
    """The SGLang servers of a pool: `data` of them, each over `tensor` devices.

    They end with this process, however it ends, and answer nobody who lacks their key, which is
    made for them.

    Example:
        servers = SglangServers(config, Pool("sglang", data=2), Path("models/SmolLM2-135M"))
        sampler = HttpSampler(servers.remotes, version=0, replicas=servers)
    """

    def __init__(self, config: Config, pool: Pool, model_dir: Path) -> None:
        """Starts all servers at once and returns when all of them answer, which takes minutes.

        Raises:
          UserError: SGLang is missing, or a server doesn't start (with the end of its log). No
            server is left running then. Or the directory means one model to SGLang and another to
            the learner.
        """
        check_stored(model_dir)
        self._config, self._settings = config, SglangConfig.of(config)
        self._pool, self._model_dir, self._token = pool, model_dir, secrets.token_urlsafe()
        self._python = interpreter(self._settings)
        self._release = installed_release(self._python)
        self._own_logs = not self._settings.log_dir
        self._logs = Path(self._settings.log_dir or private_directory(Path(tempfile.gettempdir()), "sglang"))
        self._restarts = [0] * pool.data
        self._processes: list[Process] = []
        self._closed = self._sound = False
        self._lock = threading.Lock()  # starting a server and closing all exclude each other
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            self._processes = [self._start(index) for index in range(pool.data)]
            self.remotes = [self._ready(index) for index in range(pool.data)]
            self._sound = True
        except BaseException:
            self.close()
            raise

    def died(self, index: int) -> str | None:
        process = self._processes[index]
        status = process.reaper.poll()
        return None if status is None else f"server {index} ended with status {status} ({process.log})"

    def restart(self, index: int) -> Remote:
        """Starts a server again, with the weights of the model directory. Blocks."""
        self._check_open(index)
        if self._restarts[index] >= self._settings.restarts:
            died, log = self._restarts[index] + 1, self._processes[index].log
            raise UserError(f"server {index} died {died} times (sglang.restarts is the limit; see {log})")
        self._restarts[index] += 1
        self._processes[index].stop()
        with self._lock:  # else `close` may run between the check and the start
            self._check_open(index)
            self._processes[index] = self._start(index)
        return self._ready(index)

    def _check_open(self, index: int) -> None:
        if self._closed:
            raise UserError(f"server {index}: the servers are closed")

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for process in self._processes:
            assert process.reaper.stdin is not None
            process.reaper.stdin.close()  # all at once; then wait for each
        for process in self._processes:
            process.stop()
        if self._own_logs and self._sound and not any(self._restarts):
            remove_private(self._logs)  # else they may tell why; a later run removes them

    def _start(self, index: int) -> Process:
        port = free_port(LOOPBACK)
        log = self._logs / f"sglang-{index}.log"
        command = launch_command(self._settings, self._pool, self._model_dir, port, self._release)
        command += ["--random-seed", str((self._config.seed + index) % 2**31)]
        command += ["--enable-deterministic-inference"] if self._config.deterministic else []
        # SGLang writes its arguments into it, the key among them
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as out:
            process = subprocess.Popen(
                [sys.executable, reaper.__file__, str(GRACE), self._python, *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(self._settings, self._pool, index, os.environ) | {KEY_VARIABLE: self._token},
                start_new_session=True,  # Ctrl-C reaches this process only, which then stops the server
            )
        return Process(process, port, log)

    def _ready(self, index: int) -> Remote:
        """Waits until a server answers."""
        deadline = time.monotonic() + self._settings.start_timeout
        attempts = 1
        while True:
            process = self._processes[index]
            try:
                fetch(process.base, "/health", self._token, timeout=60.0)
                info, _ = inspect(process.base, self._token)
                return Remote(process.base, info, self._token)
            except ServerLost:
                pass
            if time.monotonic() > deadline:
                raise UserError(
                    f"server {index}: no answer in {self._settings.start_timeout:g} s (sglang.start_timeout); "
                    f"the end of {process.log}:\n{process.tail()}"
                )
            try:
                status = process.reaper.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
            tail = process.tail()
            self._check_open(index)
            if attempts == PORT_ATTEMPTS or not _PORT_TAKEN.search(tail):
                alone = _NO_ACCELERATOR.search(tail) and not self._settings.device
                remedy = (
                    "\nno accelerator here: set sglang.device=cpu (docs/serving.md has the other settings for a CPU)"
                    if alone
                    else ""
                )
                raise UserError(f"server {index} ended with status {status}; the end of {process.log}:\n{tail}{remedy}")
            attempts += 1
            with self._lock:
                self._check_open(index)
                self._processes[index] = self._start(index)


def interpreter(settings: SglangConfig) -> str:
    """Returns the path of the Python that has SGLang. Raises UserError."""
    if not settings.python:
        return sys.executable
    found = shutil.which(os.path.expanduser(settings.python))
    if found is None:
        raise UserError(f"sglang.python: no such interpreter: {settings.python} ({_EXPECTED})")
    return found


def installed_release(python: str) -> tuple[int, ...]:
    """Returns the SGLang release of an interpreter, as (0, 5, 23).

    Raises UserError if it has none.
    """
    question = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = "no answer in 60 s" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        raise UserError(f"sglang.python: {python} can't be run: {why} ({_EXPECTED})") from None
    if answer.returncode:
        raise UserError(
            f"sglang.python: {python} has no SGLang (pip install 'rljax[sglang]>=0.1', or name the interpreter that has it)"
        )
    if not re.match(r"\d+\.\d", answer.stdout):
        raise UserError(f"sglang.python: {python} printed no version of SGLang, so it is no Python ({_EXPECTED})")
    return tuple(int(number) for number in re.findall(r"\d+", answer.stdout)[:3])


def launch_command(settings: SglangConfig, pool: Pool, model_dir: Path, port: int, release: Sequence[int]) -> list[str]:
    """Returns the interpreter's arguments that start a server."""
    options: dict[str, object | None] = {
        "model-path": model_dir,
        # By default it is the path, and SGLang refuses one with a colon, as of a run directory that is named for its mode
        "served-model-name": str(model_dir).replace(":", "-") if ":" in str(model_dir) else None,
        "host": LOOPBACK,
        "port": port,
        "weight-version": 0,
        "tp-size": pool.tensor,
        "dtype": settings.dtype,
        "stream-interval": settings.stream_interval,
        "device": settings.device or None,
        "attention-backend": settings.attention_backend or None,
        "mem-fraction-static": settings.mem_fraction_static,
        "context-length": settings.context_length,
        "max-running-requests": settings.max_running_requests,
    }
    command = ["-c", _BOOT]
    for name, value in options.items():
        command += [] if value is None else [f"--{name}", str(value)]
    command += ["--disable-overlap-schedule"] if settings.disable_overlap_schedule else []
    if settings.enable_multimodal:  # pictures are resized by Pillow, as the learner's are: torchvision rounds differently
        command += ["--enable-multimodal", "--disable-fast-image-processor"]
    command += ["--enable-memory-saver"] if settings.release_memory and settings.device != "cpu" else []  # no-op there
    command += ["--incremental-streaming-output"] if tuple(release) >= SPANS_AND_INTERVALS else []
    return [*command, *settings.extra_args]


def environment(settings: SglangConfig, pool: Pool, index: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of replica `index`: it sees only its own devices.

    The variables of our own launcher (torchrun) are removed: with them torch would take the server
    for a rank of the learner. So are secrets.
    """
    ours = {name for name in inherited if name in LAUNCHER_VARIABLES or name.startswith("TORCHELASTIC_")}
    env = {name: value for name, value in without_secrets(inherited).items() if name not in ours}
    if settings.device == "cpu":
        return env | {"SGLANG_USE_CPU_ENGINE": "1"}
    first = pool.first_device + index * pool.tensor
    wanted = range(first, first + pool.tensor)
    if visible := inherited.get("CUDA_VISIBLE_DEVICES"):
        names = visible.split(",")
        if wanted.stop > len(names):
            raise UserError(f"allocation_mode: the servers need device {wanted.stop - 1}, CUDA_VISIBLE_DEVICES={visible}")
        return env | {"CUDA_VISIBLE_DEVICES": ",".join(names[i] for i in wanted)}
    return env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, wanted))}
