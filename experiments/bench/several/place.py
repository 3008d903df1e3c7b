"""The machine and the settings of the measurements; programs that are started, with their logs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Program = subprocess.Popen[bytes]

TAIL = 600  # characters of what a failed program said
FORCED = "--xla_force_host_platform_device_count=8"
SERVER_ARGS_ON_A_CARD = ("--sampling-backend", "pytorch", "--grammar-backend", "none", "--cuda-graph-max-bs-decode", "256")
SERVER_ARGS_ON_CPU = ("--max-total-tokens", "16384")


class Failed(Exception):
    """A case could not be measured; the message says why, in one line."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Place to measure in, and what with.

    Example: Place(Path("out"), Path("/tmp/x"), cards=8, sglang_python="/opt/sglang/bin/python")
    """

    out: Path  # results and logs
    scratch: Path  # models and run directories
    cards: int
    model: Path | None = None  # of whole runs; None: a small one from scratch
    sglang_python: str = ""  # empty: no SGLang here
    server_args: tuple[str, ...] = SERVER_ARGS_ON_A_CARD
    chip: str = ""  # as in --topology of experiments.plan; empty: not planned for
    rehearse: bool = False  # tiny shapes on the CPU: forced devices and gloo
    visible: tuple[str, ...] = ()  # the cards that programs see, as CUDA_VISIBLE_DEVICES names them; empty: all
    programs: list[Program] = dataclasses.field(default_factory=list, compare=False)  # all that were started

    def environment(self) -> dict[str, str]:
        """Returns the environment of all programs that are started."""
        env = os.environ | {"HF_HUB_OFFLINE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if self.visible:
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(self.visible)}
        if self.rehearse:
            env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": FORCED, "OMP_NUM_THREADS": "1"}
        return env

    def log_of(self, name: str) -> Path:
        """Returns the log file of a case. Makes its folder."""
        path = self.out / "logs" / f"{file_name(name)}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def lines_of(self, name: str, module: str, flags: Sequence[object], seconds: float) -> list[Row]:
        """Runs a benchmark and returns the lines of JSON that it printed.

        Raises Failed if it fails, prints none or takes longer.
        """
        log = self.log_of(name)
        before = log.stat().st_size if log.exists() else 0  # of earlier programs of the case
        code = wait(self.start(name, f"bench.{module}", flags), seconds)
        text = log.read_bytes()[before:].decode(errors="replace")
        rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"')]
        if code != 0 or not rows:
            said = "longer than its limit" if code is None else f"exit status {code}"
            raise Failed(f"{said}: {' '.join(text[-TAIL:].split())}")
        return rows

    def start(self, name: str, module: str, flags: Sequence[object], env: Mapping[str, str] | None = None) -> Program:
        """Starts a binary of rljax, with its output in the case's log."""
        command = [sys.executable, "-m", f"rljax.experiments.{module}", *map(str, flags)]
        with self.log_of(name).open("ab") as log:
            log.write(f"$ {' '.join(command[1:])}\n".encode())
            program = subprocess.Popen(
                command,
                env=self.environment() | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.programs.append(program)
        return program


def wait(program: Program, seconds: float) -> int | None:
    """Waits for a program and returns its exit status; ends it and returns None after `seconds`."""
    try:
        return program.wait(seconds)
    except subprocess.TimeoutExpired:
        end(program)
        return None
    except BaseException:
        end(program)
        raise


def end(program: Program) -> None:
    """Ends a program and all of its session; its servers end with it."""
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 20.0)):
        if program.poll() is not None:
            return
        try:
            os.killpg(program.pid, number)
            program.wait(seconds)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def file_name(name: str) -> str:
    """Returns a name of a file for that of a case: "runs/jax:d2|jax:f2" -> "runs-jax-d2_jax-f2"."""
    return re.sub(r"[^A-Za-z0-9.+|]+", "-", name).replace("|", "_")


def seconds_since(start: float) -> float:
    return round(time.monotonic() - start, 1)
