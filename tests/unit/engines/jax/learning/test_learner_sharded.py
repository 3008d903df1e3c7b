"""The learner over 8 forced host devices gives the numbers of one device: log-probs, metrics,
gradients, parameters.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[5]
TOLERANCE = {"score": 1e-5, "after": 5e-5, "metric": 1e-4, "gradient": 1e-6, "parameter": 2e-5}  # float32


def run(vocabulary: int, meshes: list[str], out: Path) -> dict[str, dict[str, np.ndarray]]:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.unit.engines.jax.learning.sharded_learner", str(vocabulary), str(out), *meshes]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(out) as stored:
        for key in stored.files:
            mesh, name = key.split("|", 1)
            found.setdefault(mesh, {})[name] = stored[key]
    return found


@pytest.mark.parametrize(
    ("vocabulary", "meshes"),
    [
        (61, ["d1", "f2t2"]),  # a prime: the tensor axis doesn't divide the vocabulary
        pytest.param(100, ["d1", "d2f2t2", "d8", "f8"], marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_no_number(vocabulary, meshes, tmp_path):
    found = run(vocabulary, meshes, tmp_path / "out.npz")
    one = found.pop("d1")
    largest = max(np.abs(array).max() for name, array in one.items() if name.startswith("gradient"))
    assert largest > 1e-4  # what is compared below is not all zeros
    for mesh, arrays in found.items():
        assert arrays.keys() == one.keys()
        for name, array in arrays.items():
            tolerance = TOLERANCE[name.split()[0]]
            np.testing.assert_allclose(array, one[name], rtol=tolerance, atol=tolerance, err_msg=f"{mesh}: {name}")
