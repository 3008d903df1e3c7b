"""The certificate of the quickstart's model and objective, and that it is not given to a wrong gradient."""

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the certificate needs the extra [torch]")

from experiments import parity, parity_jax, parity_torch
from rljax import config_io, model_directory
from rljax.objective import Objective

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "quickstart.py"


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    config = config_io.resolve(config_io.load(str(CONFIG), [("actor.init.num_layers", "2")]))
    model_dir = model_directory.prepare(config.actor, tmp_path_factory.mktemp("parity") / "init", seed=config.seed)
    case = parity.make_case(config, model_dir, "float32", rows=2, length=16)
    return parity.with_policies_near(case, parity_jax.run(case)[0])


def test_both_paths_agree(case):
    lines, holds = parity.certificate(case, parity.Result(*parity_jax.run(case)), parity.Result(*parity_torch.run(case)))
    assert holds, "\n".join(lines)
    assert lines[-1] == "verdict: parity"


def test_another_objective_is_no_parity(case):
    """Without the decoupled weight, on one side."""
    other = dataclasses.replace(case, objective=Objective(decoupled=False))
    lines, holds = parity.certificate(case, parity.Result(*parity_jax.run(case)), parity.Result(*parity_torch.run(other)))
    assert not holds and lines[-1] == "verdict: NO PARITY"
