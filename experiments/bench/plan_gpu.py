"""Planned and measured peaks of learners and samplers on one GPU, in a table.

    python -m experiments.bench.plan_gpu --topology=h200:1
    python -m experiments.bench.plan_gpu --topology=h200:1 --sglang_python=PYTHON    # SGLang too

Three models with random weights, on both paths, ten minutes in all. Learners take steps of
experiments.bench.learner (the second half of each trajectory is trained on), the JAX sampler
requests of experiments.bench.decode, each in a process of its own; peaks are those of JAX's and
PyTorch's allocators. A server of SGLang is started, and the card's memory in use is read. A line
per case as it ends, and --json for all of them. A case that fails is reported with the end of what
it said.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from rljax.engine.rank import LOOPBACK
from rljax.experiments import main
from rljax.experiments.bench.plan_cases import SHARE, Case, learners, samplers
from rljax.experiments.bench.shapes import SHAPES, make_model

TOPOLOGY = flags.DEFINE_string("topology", "h200:1", "The GPU, as in experiments.plan.")
MODELS = flags.DEFINE_multi_enum("shape", ["smollm2-135m", "qwen3-0.6b", "qwen3-1.7b"], list(SHAPES), "Shapes of models.")
OUT = flags.DEFINE_string("json", "", "File for the table as JSON; empty: none.")
ONLY = flags.DEFINE_string("only", "", "Cases with this in their name alone, as in 'jax' or 'learner, full'; empty: all.")
SGLANG = flags.DEFINE_string("sglang_python", "", "The interpreter that has SGLang; empty: its servers are left out.")
SECONDS = flags.DEFINE_integer("seconds", 240, "Longest time of a case.", lower_bound=1)
PORT = 31999  # of a server
TAIL = 600  # characters of what a failed case said


def bench() -> None:
    table = []
    print(f"{'GB':14s} {'':22s} {'planned':>8s} {'measured':>9s} {'':>7s}")
    with tempfile.TemporaryDirectory() as directory:
        for shape in MODELS.value:
            make_model(Path(directory) / shape, shape)
            every = (*learners(shape), *samplers(shape, sglang=bool(SGLANG.value)))
            for case in (case for case in every if ONLY.value in case.what):
                planned, measured, problem = case.planned(TOPOLOGY.value) / 1e9, None, ""
                try:
                    measured = measured_gb(case, Path(directory) / shape)
                except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                    problem = str(error)
                table.append(dataclasses.asdict(case) | {"planned_gb": planned, "measured_gb": measured, "problem": problem})
                off = "" if measured is None else f"{100 * (planned / measured - 1):+.1f}%"
                shown = "-" if measured is None else f"{measured:.2f}"
                print(f"{shape:14s} {case.what:22s} {planned:8.2f} {shown:>9s} {off:>7s} {problem[-TAIL:]}", flush=True)
    if OUT.value:
        Path(OUT.value).write_text(json.dumps(table))


def measured_gb(case: Case, directory: Path) -> float:
    """Runs a case. Raises RuntimeError with the end of what it said if it fails."""
    if not case.command:
        return _server_gb(directory)
    module, *rest = case.command
    command = [sys.executable, "-m", f"rljax.experiments.bench.{module}", f"--directory={directory}", *rest]
    done = subprocess.run(
        [*command, f"--shape={case.shape}"], capture_output=True, text=True, timeout=SECONDS.value, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines or "peak_gb" not in json.loads(lines[-1]):
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-TAIL:]}")
    return float(json.loads(lines[-1])["peak_gb"])


def _server_gb(directory: Path) -> float:
    """Starts a server of SGLang and reads the card's memory in use once it is ready."""
    command = [SGLANG.value, "-m", "sglang.launch_server", f"--model-path={directory}", f"--port={PORT}"]
    command += [f"--mem-fraction-static={SHARE}", "--skip-tokenizer-init", "--attention-backend=triton"]
    command += ["--sampling-backend=pytorch", "--grammar-backend=none"]
    before = _used_gb()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, f"http://{LOOPBACK}:{PORT}/health")
        return _used_gb() - before
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(SECONDS.value):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server was not ready after {SECONDS.value} s")


def _used_gb(command: Sequence[str] = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")) -> float:
    """Memory of the first card in use, GB."""
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) * (1 << 20) / 1e9


if __name__ == "__main__":
    main.run_main(bench)
