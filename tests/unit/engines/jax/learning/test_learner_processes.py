"""A learner over 2 processes of 2 forced host devices each gives what one process of 4 gives:
numbers, checkpoints, exports.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rljax.engine.rank import LOOPBACK, ProcessRank, free_port
from tests.unit.engines.jax.learning.sharded_learner import make_model

ROOT = Path(__file__).resolve().parents[5]
TOLERANCE = {"metric": 1e-5, "gradient": 1e-7, "parameter": 1e-6, "published": 1e-6}  # sums over hosts in another order
VOCABULARY = 61


def run(directory: Path, mesh: str, processes: int, devices: int) -> dict[str, np.ndarray]:
    directory.mkdir()
    make_model(directory / "model", VOCABULARY)
    coordinator = f"{LOOPBACK}:{free_port(LOOPBACK)}"
    common = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.unit.engines.jax.learning.process_learner", str(VOCABULARY), str(directory), mesh]
    started = []
    for rank in range(processes):
        place = ProcessRank(rank, processes, rank, processes, LOOPBACK, 0, "test", coordinator)
        variables = place.variables() if processes > 1 else {}
        with (directory / f"rank{rank}.log").open("w") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, env=common | variables, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(started):
            assert process.wait(timeout=600) == 0, (directory / f"rank{rank}.log").read_text()[-4000:]
    finally:
        for process in started:
            process.kill()
    with np.load(directory / "found.npz") as stored:
        return dict(stored)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", ["d2f2", "f2t2", "f4"])
def test_processes_change_no_number(mesh, tmp_path):
    one = run(tmp_path / "one", mesh, processes=1, devices=4)
    two = run(tmp_path / "two", mesh, processes=2, devices=2)
    assert one.keys() == two.keys()
    for name, array in one.items():
        if array.dtype.kind == "U":
            continue
        tolerance = TOLERANCE.get(name.split()[0], 1e-5)
        np.testing.assert_allclose(two[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
    np.testing.assert_array_equal(two["still"], two["restored"])  # a refused checkpoint changes nothing
    for name in (name for name in two if name.startswith("restored parameter ")):
        np.testing.assert_array_equal(two[name], two[name.removeprefix("restored ")])
    assert "has no meta.json" in str(two["refusal"])
    for kind in ("export", "merged"):
        exported = [load_file(tmp_path / name / kind / "model.safetensors") for name in ("one", "two")]
        assert exported[0].keys() == exported[1].keys()
        for name, tensor in exported[0].items():
            np.testing.assert_allclose(exported[1][name], tensor, atol=1e-6, err_msg=name)
