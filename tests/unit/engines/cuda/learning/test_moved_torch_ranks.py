"""Ranks of a PyTorch learner restore a JAX learner's checkpoint; what one refuses, all refuse."""

import json
import re
import shutil

import numpy as np
import pytest

from rljax.testing import models
from rljax.testing.moving import KINDS, flat, go, make
from tests.unit.engines.cuda.learning import moved_torch_learner as script
from tests.unit.engines.cuda.learning.ranks import run_ranks

KIND = "adapters with a critic"


@pytest.mark.slow
def test_engine_portability_of_a_jax_checkpoint_to_two_ranks(tmp_path):
    model = models.make_model(tmp_path / "model")
    kind = KINDS[KIND]
    learner = make("jax", kind, model)
    go(learner, kind, kind.before)
    learner.save(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    meta = json.loads((tmp_path / "whole" / "meta.json").read_text())
    name = max(meta["files"], key=lambda name: meta["files"][name][0])
    (tmp_path / "damaged" / "tree" / name).write_bytes(b"garbage")

    said = run_ranks(script, 2, KIND, model, tmp_path / "whole", tmp_path / "damaged", tmp_path / "found.npz")
    assert re.search(r"rank 0: checkpoint: .* another rank reports why", said[0]), said[0]
    assert re.search(r"rank 1: checkpoint: .* is corrupt: ", said[1]), said[1]
    found, wanted = dict(np.load(tmp_path / "found.npz")), flat(learner.named_state())
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    learner.close()
