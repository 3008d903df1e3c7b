"""Cases of training runs, and of a run that moves to the other path and back."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rljax.experiments.bench.several import sevenths
from rljax.experiments.bench.several.case import Case, cards_of
from rljax.experiments.bench.several.place import TAIL, Failed, Place, Program, Row, file_name, wait

MODES = (
    *("jax:d1+jax:d1", "jax:d2+jax:f2"),
    *("sglang:d1+fsdp:d1", "sglang:d2+fsdp:f2", "sglang:d2|fsdp:f2", "sglang:d1+jax:d1"),
)
MOVE = ("sglang:d2+fsdp:f2", "jax:d2+jax:f2", "sglang:d2+fsdp:f2")
OUR_MOVE = ("jax:d1+fsdp:f2", "jax:d1+jax:f2", "jax:d1+fsdp:f2")  # of the learner alone, without SGLang
SMALL_MOVE = ("sglang:d1+fsdp:d1", "jax:d1+jax:d1", "sglang:d1+fsdp:d1")  # on two cards
STEPS, REHEARSED_STEPS = 20, 4
PHASES = ("wall", "update", "score", "pack", "advantages", "record", "publish")
LAST = 5  # steps at the end whose rewards are compared
FELL_BACK = "now through a directory"  # what a run's log says of a publish that its own transport did not bring


def runs(place: Place) -> Iterator[Case]:
    """Yields asynchronous runs of one config, one for each allocation_mode."""
    for mode in MODES:
        yield Case("runs", mode, cards_of(mode), 240.0 if "sglang" in mode else 90.0, partial(_measure_run, mode))


def moves(place: Place) -> Iterator[Case]:
    """Yields a run that is moved to the JAX path and back, after each third of its steps."""
    for modes in (OUR_MOVE, SMALL_MOVE, MOVE):
        yield Case("move", " > ".join(modes), max(map(cards_of, modes)), 400.0, partial(_measure_move, modes))


def _measure_run(mode: str, place: Place, name: str, limit: float) -> list[Row]:
    workdir = fresh(place, name)
    finish(start(place, name, mode, workdir, {"total_train_steps": steps_of(place)}), place, name, limit)
    return [summary(workdir) | {"mode": mode}]


def _measure_move(modes: Sequence[str], place: Place, name: str, limit: float) -> list[Row]:
    workdir, rows, until = fresh(place, name), [], time.monotonic() + limit
    each = steps_of(place) // 2
    for turn, mode in enumerate(modes, start=1):
        settings = {"total_train_steps": turn * each, "saver.freq_steps": each}
        finish(start(place, name, mode, workdir, settings), place, name, until - time.monotonic())
        rows.append(summary(workdir, first=(turn - 1) * each) | {"mode": mode, "turn": turn})
    return rows


def steps_of(place: Place) -> int:
    return REHEARSED_STEPS if place.rehearse else STEPS


def fresh(place: Place, name: str) -> Path:
    """Returns an empty place for a run's directory."""
    workdir = place.scratch / "runs" / file_name(name)
    shutil.rmtree(workdir, ignore_errors=True)
    return workdir


def start(place: Place, name: str, mode: str, workdir: Path, settings: Mapping[str, Any]) -> Program:
    """Starts experiments.train with the settings of the place and these."""
    model: dict[str, Any] = {} if place.model is None else {"actor.path": place.model}
    common = {
        "allocation_mode": mode,
        "stats_logger.live": False,
        "evaluator.freq_steps": None,
        "saver.freq_steps": None,
        "saver.export_final": False,
        "rollout.enable_rollout_tracing": True,  # which phase a run is in
        "sglang.python": place.sglang_python,
        "sglang.log_dir": f"{workdir}-servers",
        "sglang.extra_args": place.server_args,
        "sglang.attention_backend": "torch_native" if place.rehearse else "triton",
        "sglang.device": "cpu" if place.rehearse else "",
    }
    merged = common | model | (_small() if place.model is None else {}) | (_rehearsed(mode) if place.rehearse else {})
    flags = [f"--config={'quickstart' if place.model is None else 'smollm2_sums'}", f"--workdir={workdir}"]
    return place.start(
        name, "train", [*flags, *(f"--config.{key}={value}" for key, value in (merged | dict(settings)).items())]
    )


def _small() -> Row:
    """Returns keys of the quickstart, for runs without a warm-up whose model servers can load."""
    return {
        "warmup.steps": 0,
        "actor.init.max_position_embeddings": 1024,
        "sglang.context_length": 512,
        "sglang.mem_fraction_static": 0.3,
    }


def _rehearsed(mode: str) -> Row:
    """Returns keys that make a run small.

    Servers on the learner's devices get their weights by handles, as on a card.
    """
    small = {"train_dataset.batch_size": 8, "gconfig.n_samples": 4, "reward.workers": 1, "sglang.dtype": "float32"}
    small["reward.name"] = f"{sevenths.__name__}:reward"  # an untrained model answers nothing right
    transport = "ipc" if "|" in mode else "gloo"
    return small | ({"sglang.transport": transport, "sglang.bucket_mb": 1} if "sglang" in mode and "fsdp" in mode else {})


def finish(run: Program, place: Place, name: str, limit: float) -> None:
    """Waits for the end of a run. Raises Failed if it does not end well in time."""
    code = wait(run, max(limit, 1.0))
    if code != 0:
        said = place.log_of(name).read_text(errors="replace")[-TAIL:]
        raise Failed(f"{'longer than its limit' if code is None else f'exit status {code}'}: {' '.join(said.split())}")


def metrics_of(workdir: Path) -> list[Row]:
    """Returns the steps of a run; a last line that is not whole is left out."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def summary(workdir: Path, first: int = 0) -> Row:
    """Returns what is compared of a run's steps after step `first`.

    Raises Failed if there are none.
    """
    steps = [row for row in metrics_of(workdir) if row["step"] > first and "rollout/reward/avg" in row]
    if not steps:
        raise Failed(f"no step after step {first} was finished")
    config = json.loads((workdir / "config.json").read_text())
    late = steps[len(steps) // 5 :]  # without compilation and the first batch
    rewards = [row["rollout/reward/avg"] for row in steps[-LAST:]]
    batch = config["rollout"]["consumer_batch_size"] or config["train_dataset"]["batch_size"]
    return {
        "state": json.loads((workdir / "status.json").read_text())["state"],
        "first_step": steps[0]["step"],
        "last_step": steps[-1]["step"],
        "steps": len(steps),
        "asked": config["total_train_steps"] - first,
        "groups": sum(row["rollout/groups"] for row in steps),
        "batch": batch,
        "dropped": sum(row.get("rollout/dropped", 0) for row in steps),
        "fell_back": fell_back(workdir),
        "lag": max(row["rollout/staleness/max"] for row in steps),
        "lag_least": min(row["rollout/staleness/min"] for row in steps),
        "lag_bound": config["rollout"]["max_head_offpolicyness"],
        "weight": statistics.fmean(row["ppo_actor/update/behave_imp_weight/avg"] for row in steps),
        "reward_first": steps[0]["rollout/reward/avg"],
        "reward_last": statistics.fmean(rewards),
        "reward_error": reward_error(rewards, batch),
        "median": {phase: statistics.median(row.get(f"timeperf/{phase}", 0.0) for row in late) for phase in PHASES}
        | {"wait": statistics.median(row.get("rollout/wait/learner", 0.0) for row in late)},
    }


def fell_back(workdir: Path) -> int:
    """Returns how many publishes went by a directory because the run's own transport failed."""
    log = workdir / "log.txt"
    return log.read_text(errors="replace").count(FELL_BACK) if log.exists() else 0


def reward_error(rewards: Sequence[float], batch: int) -> float:
    """Returns the standard error of the mean of these steps' rewards, of 0 or 1.

    Groups are independent, and the completions of one group may all be alike: a group counts as one
    draw.
    """
    mean = statistics.fmean(rewards)
    return math.sqrt(max(mean * (1 - mean), 0.0) / (batch * len(rewards)))
