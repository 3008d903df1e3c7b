"""The bench of starts: CPU seconds of a tree of processes, and two checkouts in turns."""

import re
import subprocess
import sys

import pytest

from tests.shared import REPOSITORY

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
TREE = f"""
import subprocess, sys
burn = lambda seconds: subprocess.Popen([sys.executable, "-c", {BURN!r}.format(seconds=seconds) + "print(flush=True); input()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
ended, alive = burn(0.5), burn(0.3)
ended.communicate(b"end\\n")
alive.stdout.readline()
{BURN.format(seconds=0.4)}
print("burnt", flush=True)
input()
alive.communicate(b"end\\n")
"""


MEASURE = """
import resource, subprocess, sys
from rljax.experiments.bench.start import cpu_of
with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == "burnt\\n"
    seconds = cpu_of(process.pid)
    process.communicate("end\\n")
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(seconds, used.ru_utime + used.ru_stime, cpu_of(process.pid))
"""


def test_seconds_are_of_the_process_and_of_children_that_live_and_that_have_ended():
    """They are what the system says of the whole tree once all of it has ended."""
    measured = subprocess.check_output([sys.executable, "-c", MEASURE, TREE], text=True, cwd=REPOSITORY)
    seconds, total, afterwards = map(float, measured.split())
    assert seconds >= 1.2 - 3 * 0.02 and seconds == pytest.approx(total, abs=0.15) and afterwards == 0.0


def bench(*arguments):
    command = [sys.executable, "-m", "experiments.bench.start", "--config=configs/quickstart.py", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_two_checkouts_are_measured_in_turns():
    small = ("allocation_mode=fake:d1", "warmup.steps=2", "train_dataset.batch_size=2", "gconfig.n_samples=2")
    done = bench(
        *(f"--config.{change}" for change in small), "--config.evaluator.freq_steps=None", f"--peer={REPOSITORY}", "--pairs=2"
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line.startswith("| ")]
    names = [(row[0], row[1]) for row in rows[2:]]
    assert names == [("this", "1"), ("peer", "1"), ("peer", "2"), ("this", "2"), ("this", "median"), ("peer", "median")]
    cpu = [[float(cell) for cell in row[3:7]] for row in rows[2:]]
    assert all(row == sorted(row) and row[0] > 0 for row in cpu)  # in the order in which they are reached
    ratios = [float(ratio) for ratio in re.findall(r"\d+\.\d\d", done.stdout.splitlines()[-1])]
    assert ratios[1:] == pytest.approx([cpu[0][3] / cpu[1][3], cpu[3][3] / cpu[2][3]], abs=0.05)
    assert ratios[0] == pytest.approx(sum(ratios[1:]) / 2, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--peer=tests"], "--peer: no checkout of rljax: tests"),
        (["--config.reward.name=nothing"], "the run ended before step 901: error: reward.name: no reward named 'nothing'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, line):
    done = bench(*arguments, "--config.allocation_mode=fake:d1")
    assert done.returncode == 1 and done.stderr.startswith(f"error: {line}") and done.stderr.count("\n") == 1
