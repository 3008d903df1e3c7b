"""Ranks of a PyTorch learner: a script of the tests in several processes, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

from rljax.engine.rank import LOOPBACK, free_port
from tests.shared import REPOSITORY


def run_ranks(script: ModuleType, size: int, *arguments: object) -> list[str]:
    """Runs a script as `size` ranks, and returns what each of them printed."""
    rendezvous = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port(LOOPBACK)), "WORLD_SIZE": str(size)}
    here = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", script.__name__, *map(str, arguments)],
            cwd=REPOSITORY,
            env={**os.environ, **rendezvous, **here, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)
    return outputs
