"""Engine portability: what one engine's learner saved, the other's goes on from: to the bit, and
then to float32 rounding.
"""

import json
import math
import re
import shutil

import numpy as np
import pytest

from rljax.engines.cuda import plugin
from rljax.errors import UserError
from rljax.testing import models
from rljax.testing.moving import KINDS, assert_equal, flat, go, make

WAYS = [("jax", "fsdp"), ("fsdp", "jax")]
BOUND = 1e-5  # docs/moving.md: in the step after the move, and as much more for every further one


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return models.make_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


@pytest.fixture(scope="module", params=WAYS, ids=" to ".join)
def way(request):
    return request.param


def assert_close(found, wanted, bound):
    """Metrics, to a part of themselves or of 1."""
    assert found.keys() == wanted.keys()
    for name, mean in wanted.items():
        # Of weights that moved: one whose step is below its last bit may move on one engine alone
        slack = 1e-3 if name.endswith("/rounded_away") else 0.0
        assert math.isclose(found[name].count, mean.count, rel_tol=slack), name
        for field in ("value", "min", "max"):
            a, b = getattr(found[name], field), getattr(mean, field)
            assert (a is None) == (b is None) and (b is None or math.isclose(a, b, rel_tol=bound, abs_tol=bound)), (name, a, b)


def assert_near(found, wanted, bound):
    """States, to a part of the largest entry of a place."""
    assert found.keys() == wanted.keys()
    for place, arrays in wanted.items():
        largest = max(float(np.abs(array).max()) for array in arrays.values())
        for name, array in arrays.items():
            np.testing.assert_allclose(found[place][name], array, rtol=0, atol=bound * largest, err_msg=f"{place} {name}")


SLOW = ("adapters", "before its first step", "in the warm-up", "critic and reference")  # others have the like


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())


@pytest.mark.parametrize("name", [marked(name) for name in KINDS])
def test_engine_portability_of_a_learner(name, way, model, tmp_path):
    kind, (source, target) = KINDS[name], way
    unmoved = make(source, kind, model)
    go(unmoved, kind, kind.before)
    unmoved.save(tmp_path / "there")
    moved = make(target, kind, model)
    moved.restore(tmp_path / "there")
    assert_equal(moved.named_state(), unmoved.named_state())

    steps = zip(go(moved, kind, kind.after, seed=7), go(unmoved, kind, kind.after, seed=7), strict=True)
    for k, (found, wanted) in enumerate(steps):
        assert_close(found, wanted, (1 + k) * BOUND)
    assert_near(moved.named_state(), unmoved.named_state(), (1 + sum(kind.after)) * BOUND)

    moved.save(tmp_path / "and back")
    unmoved.restore(tmp_path / "and back")
    assert_equal(unmoved.named_state(), moved.named_state())
    moved.close()
    unmoved.close()


@pytest.fixture(scope="module")
def saved(way, model, tmp_path_factory):
    """A checkpoint of the source, and a learner of the target that is not there yet."""
    kind, directory = KINDS["all parameters"], tmp_path_factory.mktemp("saved") / "checkpoint"
    learner = make(way[0], kind, model)
    go(learner, kind, (0, 1))
    learner.save(directory)
    learner.close()
    target = make(way[1], kind, model)
    yield directory, target
    target.close()


def copied(directory, tmp_path, **changes):
    """Of a checkpoint, with other words in its meta.json."""
    shutil.copytree(directory, tmp_path / "copy")
    meta = json.loads((directory / "meta.json").read_text())
    (tmp_path / "copy" / "meta.json").write_text(json.dumps(meta | changes))
    return tmp_path / "copy"


def refused(learner, directory):
    """The line that a learner refuses a checkpoint with; nothing of it has changed."""
    before = learner.named_state()
    with pytest.raises(UserError) as caught:
        learner.restore(directory)
    after = flat(learner.named_state())
    for name, array in flat(before).items():
        np.testing.assert_array_equal(after[name], array)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_foreign_checkpoint_that_is_corrupt_or_torn_is_refused_as_an_own_one(saved, tmp_path):
    directory, learner = saved
    damaged = copied(directory, tmp_path)
    largest = max((p for p in (damaged / "tree").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert re.search(r"is corrupt: its checksum ", refused(learner, damaged))
    largest.unlink()
    assert re.search(r"is missing$", refused(learner, damaged))


def test_a_foreign_checkpoint_of_another_run_is_refused_with_the_difference(saved, tmp_path):
    directory, learner = saved
    other = copied(directory, tmp_path / "lora", lora={"rank": 2, "target_modules": ["q_proj"]})
    assert "another lora" in refused(learner, other)
    unknown = copied(directory, tmp_path / "unknown", format="theirs/3")
    assert re.search(r"'theirs/3', which no installed engine reads \(.*wrote it", refused(learner, unknown))
    warm = copied(directory, tmp_path / "warm", phases=["supervised", "rl"])
    assert re.search(r"it has no supervised/mu \(use the config", refused(learner, warm))


def test_what_reading_a_torch_checkpoint_takes_is_said_where_it_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"fsdp; reading it needs torch \(pip install 'rljax\[torch\]>=0.1'\)"):
        plugin.FSDP.read_checkpoint(tmp_path)
