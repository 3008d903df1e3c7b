"""Commands that are started with closed standard streams, as daemons are."""

import itertools
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from rljax.experiments import main
from rljax.sinks.live import LineSink, can_be_live
sys.argv[1:] = []

def run():
    with open("data", "w") as file:
        assert file.fileno() > 2
        print("for the screen")
        print("for the screen", file=sys.stderr, flush=True)
        os.write(2, b"for the screen, as a watchdog writes")
        assert not can_be_live(sys.stdout)
        LineSink()
        file.write("whole")

main.run_main(run)
"""
CLOSED = [closed for n in (1, 2, 3) for closed in itertools.combinations(("<&-", ">&-", "2>&-"), n)]


@pytest.mark.parametrize("closed", CLOSED, ids="".join)
def test_a_file_never_takes_the_place_of_a_closed_stream(tmp_path, closed):
    command = ["sh", "-c", f'"$0" -c "$1" {" ".join(closed)}', sys.executable, PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "data").read_text() == "whole"
