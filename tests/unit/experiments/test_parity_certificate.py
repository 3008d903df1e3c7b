"""The certificate of the quickstart's model and objective, and that it is not given to a wrong
gradient or optimizer.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the certificate needs the extra [torch]")

from rljax.backends.torch import optim
from rljax.config import io as config_io
from rljax.errors import UserError
from rljax.experiments import main, parity, parity_jax, parity_torch
from rljax.hf import model_directory
from rljax.hf.model_directory import prepare_model_directory
from rljax.objective.spec import Objective
from rljax.testing.models import config_of, make_model

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "quickstart.py"


def case_of(config, model_dir):
    case = parity.make_case(config, model_dir, "float32", rows=2, length=16)
    return parity.with_policies_near(case, parity_jax.run(case)["logp"])


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    config = config_io.resolve(
        config_io.load(str(CONFIG), [("actor.init.num_layers", "2"), ("actor.optimizer.weight_decay", "0.01")])
    )
    return case_of(config, prepare_model_directory(config.actor, tmp_path_factory.mktemp("parity") / "init", seed=config.seed))


@pytest.fixture(scope="module")
def ours(case):
    return parity.Result(**parity_jax.run(case)), parity_jax.two_steps(case)


def report_of(case, ours, other):
    """Makes the report of our path on one case and of theirs on another."""
    result, steps = ours
    theirs = parity.Result(**parity_torch.run(other))
    return parity.compare(case, result, theirs).with_optimizers(steps, parity_torch.two_steps(other))


def exceeded(report):
    """Kinds of checks that fail."""
    return {check.name.partition(" model.")[0] for check in (*report.whole, *report.tensors) if not check.holds}


def with_optimizer(case, **changes):
    actor = case.config.actor
    actor = dataclasses.replace(actor, optimizer=dataclasses.replace(actor.optimizer, **changes))
    return dataclasses.replace(case, config=dataclasses.replace(case.config, actor=actor))


def test_both_paths_agree(case, ours, tmp_path):
    report = report_of(case, ours, case)
    assert report.holds, "\n".join(report.lines())
    assert report.lines()[-1] == "verdict: parity"
    report.write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written["verdict"], written["dtype"]) == ("parity", "float32")
    trained = set(ours[0].gradients)
    for kind in ("gradient of", "optimizer step of", "optimizer alone on"):
        assert {f"{kind} {name}" for name in trained} <= {check["name"] for check in written["checks"] if check["holds"]}


def test_a_report_that_could_not_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    old = tmp_path / "old.json"
    old.write_text("{}")
    main.check_writable(old)
    main.check_writable(tmp_path / "new.json")
    assert [p.name for p in tmp_path.iterdir()] == ["old.json"] and old.read_text() == "{}"
    monkeypatch.setattr(parity, "JSON", SimpleNamespace(value=str(tmp_path / "none" / "report.json")))
    monkeypatch.setattr(parity.main, "config_from_flags", lambda: config_io.load(str(CONFIG), []))
    monkeypatch.setattr(model_directory, "prepare_model_directory", lambda *args, **options: pytest.fail("the work was begun"))
    with pytest.raises(UserError, match=r"--json: cannot write .*report\.json"):
        parity.parity()


def test_another_objective_is_no_parity(case, ours):
    """One side lacks the decoupled weight."""
    report = report_of(case, ours, dataclasses.replace(case, objective=Objective(decoupled=False)))
    assert report.lines()[-1] == "verdict: NO PARITY"
    assert "gradient of" in exceeded(report)


@pytest.mark.parametrize("changes", [{"eps": 1e-7}, {"beta1": 0.91}, {"beta2": 0.951}, {"weight_decay": 0.011}], ids=str)
def test_another_optimizer_is_no_parity(case, ours, changes):
    report = report_of(case, ours, with_optimizer(case, **changes))
    assert report.verdict == "NO PARITY"
    assert "optimizer alone on" in exceeded(report) and "gradient of" not in exceeded(report)


def test_decay_of_norms_is_no_parity(case, ours, monkeypatch):
    monkeypatch.setattr(optim, "decays", lambda name: True)
    report = report_of(case, ours, case)
    assert report.verdict == "NO PARITY"
    failed = {check.name for check in report.tensors if not check.holds}
    assert failed and all("norm" in name for name in failed)


def test_not_a_number_is_no_parity(case, ours):
    result = dataclasses.replace(ours[0], loss=float("nan"))
    assert parity.compare(case, result, ours[0]).verdict == "NO PARITY"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_architecture(architecture, tmp_path):
    """Any model directory."""
    config = config_io.resolve(config_of(**{"actor.path": str(tmp_path / "model"), "gconfig.n_samples": 2}))
    case = case_of(config, make_model(tmp_path / "model", architecture=architecture))
    report = report_of(case, (parity.Result(**parity_jax.run(case)), parity_jax.two_steps(case)), case)
    assert report.holds, "\n".join(report.lines())
