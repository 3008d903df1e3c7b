"""experiments.report: bad input is one line; a run's page is written where it was asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.diagnosis import History, diagnose


def report(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.report", *map(str, arguments)]
    return subprocess.run(command, cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "--workdir: missing"),
        (("--workdir=nowhere", "--out=x.html"), "--workdir: no such directory: nowhere"),
        (("--workdir=a,b",), "--out: missing"),
        (("--workdir=a", "--workdir=a", "--out=x.html"), "--workdir: a run is named twice"),
    ],
)
def test_bad_input_is_one_line_and_status_1(arguments, line):
    done = report(*arguments)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {line}") and done.stderr.count("\n") == 1


def test_a_page_is_written_with_the_verdict_on_the_terminal(tmp_path):
    workdir, out = tmp_path / "run", tmp_path / "new" / "page.html"
    workdir.mkdir()
    rows = ({"step": step, "rollout/reward": 0.01 * step} for step in range(1, 4))
    (workdir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = report(f"--workdir={workdir}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{out}: ") and f"{workdir}: {diagnose(History.load(workdir)).verdict()}\n" in done.stdout
    assert out.read_text().startswith("<!doctype html>")
