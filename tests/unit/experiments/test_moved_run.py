"""Engine portability by the command line: the same --workdir with another allocation_mode goes on,
and its metrics are those of a run that stayed. The JAX sampler samples in all of them.
"""

import math

import pytest

from tests.unit.experiments.test_train import SYNCHRONOUS, comparable, kill_after_checkpoint, lines, train

SMALL = (  # 4 steps of the warm-up and 5 of RL; a checkpoint every 3 steps
    SYNCHRONOUS,
    "--config.train_dataset.batch_size=8",
    "--config.jax.slots=32",
    "--config.total_train_steps=5",
    "--config.reward.name=sevenths:reward",
)
STEPS = 9
REWARD = "def reward(prompt, completion):\n    return sum(map(ord, completion)) % 7 / 7\n"  # any model differs in it
ENGINES = {"jax": "--config.allocation_mode=jax:d1", "fsdp": "--config.allocation_mode=jax:d1+fsdp:d1"}
BOUND = 1e-5  # docs/moving.md: in the step after the move, and as much more for every further one


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    """A module that the runs can import."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "sevenths.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield


@pytest.fixture(scope="module")
def stayed(reward, tmp_path_factory):
    """Metrics of runs that never move, by engine."""
    found = {}
    for engine, mode in ENGINES.items():
        workdir = tmp_path_factory.mktemp("stayed") / engine
        code, _, err = train(workdir, *SMALL, mode)
        assert code == 0, err
        found[engine] = comparable(lines(workdir / "metrics.jsonl"))
        assert found[engine][-1]["step"] == STEPS
        assert all(entry["ppo_actor/update/grad_norm"] > 0 for entry in found[engine][4:])
    return found


def assert_near(found, wanted, first):
    """Asserts equality to the bit up to step `first`, and within the bound after it."""
    assert [entry["step"] for entry in found] == [entry["step"] for entry in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.keys() == b.keys()
        bound = BOUND * max(a["step"] - first, 0)
        for name, value in b.items():
            near = math.isclose(a[name], value, rel_tol=bound, abs_tol=bound)
            assert near, f"step {a['step']}: {name} is {a[name]}, and {value} in the run that stayed"


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first of them has the runs that stay before it
@pytest.mark.parametrize("step", [3, 6], ids=["in the warm-up", "in RL"])
@pytest.mark.parametrize(("source", "target"), [("jax", "fsdp"), ("fsdp", "jax")])
def test_engine_portability_of_a_run(stayed, source, target, step, tmp_path):
    workdir = tmp_path / "moved"
    kill_after_checkpoint(step, workdir, *SMALL, ENGINES[source])
    first = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())
    assert first < STEPS
    code, _, err = train(workdir, *SMALL, ENGINES[target])
    assert code == 0, err
    assert_near(comparable(lines(workdir / "metrics.jsonl")), stayed[source], first)
