"""Pools on the same devices: sampler and learner dispatch from threads of their own, and neither
waits for ever.
"""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.backends.jax.mesh import dispatching, pool_mesh
from rljax.config.allocation import Pool

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("mesh", ["f2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("d2", "f2t2"))])
def test_sampling_and_learning_on_the_same_devices_go_on(mesh, tmp_path):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.unit.engines.jax.shared_pool", str(tmp_path / "model"), mesh, "30"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    completions, steps = map(int, re.findall(r"\d+", done.stdout))
    assert completions >= 8 and steps == 30


def test_one_device_needs_no_turns():
    assert isinstance(dispatching(pool_mesh(Pool("jax"))), contextlib.nullcontext)
