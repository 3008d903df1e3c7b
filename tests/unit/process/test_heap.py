"""Memory that stays in the process when it is freed."""

import subprocess
import sys

import pytest

from rljax.process import heap

PAGES = 16384
PROGRAM = f"""
import resource
import numpy as np
from rljax.process.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones({PAGES} * resource.getpagesize(), np.uint8)  # written once and freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
usual = faults()
assert keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc's malloc can be told")
def test_a_buffer_that_is_taken_again_maps_no_page_anew():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert usual > kept
    assert kept < PAGES / 100


def test_a_system_without_mallopt_says_so(monkeypatch):
    monkeypatch.setattr(heap.sys, "platform", "darwin")
    assert not heap.keep_freed_memory()
