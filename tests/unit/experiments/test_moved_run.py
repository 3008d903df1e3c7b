"""Law 9 by the command line: the same --workdir with another allocation_mode goes on, and its metrics are those of a run that
stayed. The JAX sampler samples in all of them."""

import math

import pytest

from tests.unit.experiments.test_train import SYNCHRONOUS, comparable, kill_after_checkpoint, lines, train

SMALL = (
    SYNCHRONOUS,
    "--config.train_dataset.batch_size=8",
    "--config.jax.slots=32",
    "--config.total_train_steps=9",
)  # after 4 of the warm-up; a checkpoint every 3 steps
ENGINES = {"jax": "--config.allocation_mode=jax:d1", "fsdp": "--config.allocation_mode=jax:d1+fsdp:d1"}
BOUND = 1e-5  # docs/moving.md: in the step after the move, and as much more for every further one


@pytest.fixture(scope="module")
def stayed(tmp_path_factory):
    """Metrics of runs that never move, by engine."""
    found = {}
    for engine, mode in ENGINES.items():
        workdir = tmp_path_factory.mktemp("stayed") / engine
        code, _, err = train(workdir, *SMALL, mode)
        assert code == 0, err
        found[engine] = comparable(lines(workdir / "metrics.jsonl"))
    return found


def assert_near(found, wanted, first):
    """To the bit up to step `first`, within the bound after it."""
    assert [entry["step"] for entry in found] == [entry["step"] for entry in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        bound = BOUND * (a["step"] - first)
        for name in b:
            assert a[name] == b[name] or (bound > 0 and math.isclose(a[name], b[name], rel_tol=bound, abs_tol=bound)), (
                a["step"], name, a[name], b[name],
            )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 9], ids=["in the warm-up", "in RL"])
@pytest.mark.parametrize(("source", "target"), [("jax", "fsdp"), ("fsdp", "jax")])
def test_law_9_a_run_moves(stayed, source, target, step, tmp_path):
    workdir = tmp_path / "moved"
    kill_after_checkpoint(step, workdir, *SMALL, ENGINES[source])
    code, _, err = train(workdir, *SMALL, ENGINES[target])
    assert code == 0, err
    assert f"going on from step {step}" in err
    assert_near(comparable(lines(workdir / "metrics.jsonl")), stayed[source], step)
