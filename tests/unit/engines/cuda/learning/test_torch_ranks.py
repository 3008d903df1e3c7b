"""A learner in several processes gives the numbers it gives in one, however it is split."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rljax.config.allocation import Pool
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.testing import models
from rljax.testing.learner_batches import config_of
from tests.unit.engines.cuda.learning import sharded_torch_learner as script
from tests.unit.engines.cuda.learning.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[5]
BOUND = 5e-5  # of float32 sums in another order, after one step of 1e-2 / (|g| + 1e-2)


def run(size: int, model: Path, out: Path, *layouts: str) -> dict[str, dict[str, np.ndarray]]:
    """Runs the script in several processes and returns {layout: {name: array}}."""
    out.mkdir()
    run_ranks(script, size, model, out, *layouts)
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, array in np.load(out / "found.npz").items():
        layout, name = key.split("|")
        found.setdefault(layout, {})[name] = array
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return models.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    return script.step("d1", model, tmp_path_factory.mktemp("alone"), {})


def assert_same(found: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> None:
    assert set(alone) <= set(found)
    for name, array in alone.items():
        np.testing.assert_allclose(found[name], array, atol=BOUND, rtol=BOUND, err_msg=name)


def test_split_invariance_over_two_ranks_of_any_kind(model, alone, tmp_path):
    found = run(2, model, tmp_path / "two", "d2", "f2", "c2", "t2")
    assert set(found) == {"d2", "f2", "c2", "t2"}
    for arrays in found.values():
        assert_same(arrays, alone)
        np.testing.assert_allclose(arrays["moved"], arrays["moved from"], atol=BOUND)
    assert_exported(tmp_path / "two" / "export t2", alone)


def assert_exported(directory: Path, alone: dict[str, np.ndarray]) -> None:
    again = TorchLearner(config_of(), Pool("fsdp"), directory)
    np.testing.assert_allclose(again.score(script.batch_of()), alone["later"], atol=BOUND)
    again.close()


@pytest.mark.slow
def test_four_ranks_of_two_kinds_give_the_numbers_of_one(model, alone, tmp_path):
    for arrays in run(4, model, tmp_path / "four", "d2f2", "f2t2", "c2t2", "d2c2", "f4").values():
        assert_same(arrays, alone)
        np.testing.assert_allclose(arrays["moved"], arrays["moved from"], atol=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("variant", script.VARIANTS)
def test_adapters_and_whole_sequences_under_two_ranks_give_the_numbers_of_one(model, tmp_path, variant):
    alone = script.step("d1", model, tmp_path, script.VARIANTS[variant])
    for layout, arrays in run(2, model, tmp_path / variant, "d2", "f2", "c2", "t2").items():
        assert_same(arrays, alone)
        assert_exported(tmp_path / variant / f"export {layout}", alone)


IN_TURN = """
import sys
from pathlib import Path
from rljax.config.allocation import Pool
from rljax.experiments.bench.ranks import learner_of
from rljax.testing.learner_batches import config_of
from tests.unit.engines.cuda.learning.sharded_torch_learner import batch_of

model, scratch = map(Path, sys.argv[1:])
for turn, pool in enumerate([Pool("fsdp", fsdp=2), Pool("fsdp", data=2), Pool("fsdp")]):
    (scratch / str(turn)).mkdir()
    with learner_of(config_of(), pool, model, scratch / str(turn)) as learner:
        print("score", learner.score(batch_of()).sum(), flush=True)
"""


@pytest.mark.slow
def test_a_process_may_have_learners_of_several_processes_in_turn(model, tmp_path):
    """Several runs in one notebook make such learners one after the other."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", IN_TURN, str(model), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    scores = [float(line.split()[1]) for line in lines if line.startswith("score")]
    assert len(scores) == 3
    np.testing.assert_allclose(scores, scores[-1], rtol=BOUND)
