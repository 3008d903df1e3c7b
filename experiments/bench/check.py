"""Times `rljax check` on a large file of prompts: seconds by part, of two calls.

    python -m experiments.bench.check --config=configs/smollm2_gsm8k.py --prompts=500000

The config's training and validation data are replaced by a made-up file in the form of GSM8K, with
prompts of 20 to 60 words. The second call finds the lengths that the first one has remembered.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from absl import flags

from rljax.config.schema import Config
from rljax.experiments import main
from rljax.experiments.check import Checks

PROMPTS = flags.DEFINE_integer("prompts", 500_000, "Training prompts to check.", lower_bound=1)
HELD_OUT = 1000
WORDS = (
    "a",
    "the",
    "each",
    "has",
    "pays",
    "apples",
    "students",
    "hours",
    "then",
    "how",
    "many",
    "more",
    "than",
    "week",
    "total",
)


T = TypeVar("T")


class TimedChecks(Checks):
    """Checks that keep the seconds of each part."""

    def __init__(self, config: Config, scratch: Path) -> None:
        super().__init__(config, scratch)
        self.wall: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.cpu: collections.defaultdict[str, float] = collections.defaultdict(float)  # of this process

    def _attempt(self, part: str, action: Callable[[], T], *, needs: Sequence[str] = ()) -> T | None:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return super()._attempt(part, action, needs=needs)
        finally:
            self.wall[part] += time.perf_counter() - wall
            self.cpu[part] += time.process_time() - cpu


def write(path: Path, count: int, first: int) -> None:
    """Writes records whose questions all differ."""
    random = np.random.default_rng(first)
    with path.open("w") as file:
        for number in range(first, first + count):
            words = [WORDS[i] for i in random.integers(len(WORDS), size=random.integers(20, 61))]
            record = {"question": f"{number} {' '.join(words)}?", "answer": f"It is {number}.\n#### {number}"}
            file.write(json.dumps(record) + "\n")


def bench() -> None:
    config = main.config_from_flags()
    with tempfile.TemporaryDirectory(prefix="rljax-bench-") as folder:
        data = Path(folder) / "data"
        data.mkdir()
        write(data / "train.jsonl", PROMPTS.value, first=HELD_OUT)
        write(data / "test.jsonl", HELD_OUT, first=0)
        print(f"{PROMPTS.value} prompts, {(data / 'train.jsonl').stat().st_size / 1e6:.0f} MB")
        os.environ["XDG_CACHE_HOME"] = folder  # nothing is remembered yet
        config = dataclasses.replace(
            config,
            train_dataset=dataclasses.replace(config.train_dataset, path=str(data), type="gsm8k"),
            valid_dataset=dataclasses.replace(config.valid_dataset, path=str(data), type="gsm8k"),
        )
        print("| call | part | s | CPU s of the process |\n| --- | --- | --- | --- |")
        for call in ("first", "second"):
            measure(call, config, Path(folder) / call)


def measure(call: str, config: Config, scratch: Path) -> None:
    scratch.mkdir()
    wall, cpu = time.perf_counter(), time.process_time()
    checks = TimedChecks(config, scratch)
    findings = checks.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    for part, seconds in checks.wall.items():
        print(f"| {call} | {part} | {seconds:.1f} | {checks.cpu[part]:.1f} |")
    rest = wall - sum(checks.wall.values()), cpu - sum(checks.cpu.values())
    print(f"| {call} | the rest | {rest[0]:.1f} | {rest[1]:.1f} |")
    print(f"| {call} | all, {len(findings)} findings | {wall:.1f} | {cpu:.1f} |", flush=True)


if __name__ == "__main__":
    main.run_main(bench)
