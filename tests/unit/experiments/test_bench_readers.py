"""Benchmarks read all parts of a run's files: where a file was cut into parts changes nothing."""

import json
import os
import subprocess
import sys

import pytest

from rljax.experiments.bench.run_library.kept import KeptRun
from tests.shared import REPOSITORY

STEPS = 12


def write(workdir, last_steps):
    """Writes a run's metrics and samples in parts that end with these steps."""
    workdir.mkdir()
    (workdir / "config.json").write_text('{"seed": 1}')
    for name in ("metrics", "samples"):
        rows = [{"step": step, "rollout/reward/avg": step / STEPS, "text": "two\u2028lines"} for step in range(1, STEPS + 1)]
        for begin, end in zip((0, *last_steps), (*last_steps, STEPS), strict=True):
            part = f"{name}.jsonl" if end == STEPS else f"{name}.{end:08d}.jsonl"
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows[begin:end]]
            (workdir / part).write_text("".join(lines))
    return workdir


@pytest.mark.parametrize("cuts", [(5,), (1, 2, 11)], ids=str)
def test_a_kept_run_has_all_parts(tmp_path, cuts):
    whole, parts = (KeptRun.of("grpo", 1, 1.0, write(tmp_path / str(len(at)), at), []) for at in ((), cuts))
    assert parts == whole and [row["step"] for row in parts.files["samples.jsonl"]] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("module", ["curves", "gpu_run"])
def test_a_curve_and_a_copy_of_the_metrics_have_all_parts(tmp_path, module):
    """Each binary runs in its own process, for the flags of two have the same names."""
    whole, parts = write(tmp_path / "whole", ()), write(tmp_path / "parts", (1, 2, 11))
    calls = {
        "curves": "print(curves.points(pathlib.Path(sys.argv[1]), 'rollout/reward/avg'))",
        "gpu_run": "gpu_run.keep(pathlib.Path(sys.argv[1]), pathlib.Path('copy')); print(pathlib.Path('copy').read_text())",
    }
    code = f"import pathlib, sys; from rljax.experiments.bench import {module}; {calls[module]}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    said = [
        subprocess.run(
            [sys.executable, "-c", code, workdir], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout
        for workdir in (whole, parts)
    ]
    want = {
        "curves": str([(step, step / STEPS) for step in range(1, STEPS + 1)]),
        "gpu_run": (whole / "metrics.jsonl").read_text(),
    }
    assert said == [want[module] + "\n"] * 2
