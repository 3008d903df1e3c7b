"""Model directories from checkpoints: the same as the learner's own export, and found by step."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rljax.checkpoints import export
from rljax.checkpoints.integrity import write_manifest
from rljax.checkpoints.store import Checkpoints
from rljax.config.allocation import Pool
from rljax.engine import ExportToDirectory
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.errors import UserError
from rljax.hf.weights import WeightReader
from rljax.testing.models import config_of, make_model

LORA = {"actor.lora.rank": 3, "actor.lora.alpha": 6.0, "actor.lora.target_modules": ("q_proj", "down_proj")}


def arrays(directory: Path) -> dict[str, np.ndarray]:
    reader = WeightReader(directory)
    return {name: reader.read(name).astype(np.float32) for name in reader.shapes}


def trained(tmp_path, **overrides):
    """Makes a learner whose policy has moved from the initial model, and a checkpoint of it."""
    config = config_of(**{"total_train_steps": 4, **overrides})
    model_dir = make_model(tmp_path / "model")
    learner = JaxLearner(config, Pool("jax"), model_dir)
    generator = np.random.default_rng(0)
    moved = jax.tree.map(lambda leaf: leaf + 0.02 * generator.normal(size=leaf.shape).astype(leaf.dtype), learner._weights())
    learner._set_weights(moved)
    checkpoint = tmp_path / "checkpoints" / "4"
    learner.save(checkpoint / "learner")
    write_manifest(checkpoint, {"step": 4, "score": 0.5})
    return config, model_dir, learner, checkpoint


@pytest.mark.parametrize("overrides", [{}, LORA], ids=["all weights", "adapters"])
def test_a_checkpoint_exports_what_its_learner_exports(tmp_path, overrides):
    config, model_dir, learner, checkpoint = trained(tmp_path, **overrides)
    learner.export(ExportToDirectory(tmp_path / "by_learner"))
    export.export_model(checkpoint, config, model_dir, tmp_path / "out" / "model", dtype="float32")
    ours, theirs, initial = (arrays(tmp_path / name) for name in ("out/model", "by_learner", "model"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6)
    moved = {name for name in ours if not np.array_equal(ours[name], initial[name])}
    expected = {
        name for name in ours if not overrides or any(f".{target}." in name for target in LORA["actor.lora.target_modules"])
    }
    assert moved == expected
    companions = {path.name for path in (tmp_path / "by_learner").iterdir()}
    assert {path.name for path in (tmp_path / "out" / "model").iterdir()} == companions


def test_an_adapter_is_what_has_to_be_added(tmp_path):
    """Merges an adapter by peft's rule: W + alpha / r * B A, with its names."""
    config, model_dir, learner, checkpoint = trained(tmp_path, **LORA)
    export.export_adapter(checkpoint, config, model_dir, tmp_path / "adapter")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (3, 6.0, ["down_proj", "q_proj"])
    learner.export(ExportToDirectory(tmp_path / "whole"))
    whole, initial = arrays(tmp_path / "whole"), arrays(model_dir)
    stems = {name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")}
    assert len(stems) == 4  # two projections, two layers
    for stem in stems:
        name = f"{stem.removeprefix('base_model.model.')}.weight"
        a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]
        np.testing.assert_allclose(initial[name] + 6.0 / 3 * b @ a, whole[name], atol=1e-6)


def test_without_adapters_there_is_none_to_export(tmp_path):
    config, model_dir, _, checkpoint = trained(tmp_path)
    with pytest.raises(UserError, match=r"--lora: .* has no adapters"):
        export.export_adapter(checkpoint, config, model_dir, tmp_path / "adapter")
    with pytest.raises(UserError, match=r"--lora: .* has no adapters"):
        export.export_both(checkpoint, config, model_dir, tmp_path / "adapter", dtype="float32")
    assert not (tmp_path / "adapter").exists()


def made(workdir, scores):
    """Makes checkpoints of steps with scores."""
    checkpoints = Checkpoints(workdir / "checkpoints", keep_last=9)
    for step, score in scores.items():
        checkpoints.save(step, lambda directory: (directory / "x").write_text("x"), score=score)
    return checkpoints


def test_checkpoints_are_found_by_step_age_and_score(tmp_path):
    checkpoints = made(tmp_path, {10: 0.2, 20: 0.7, 30: None})
    checkpoints.save(35, lambda directory: (directory / "x").write_text("x"), failed=True)
    found = {which: export.find(tmp_path, which).path.name for which in ("newest", "best", "10", "35-failed")}
    assert found == {"newest": "30", "best": "20", "10": "10", "35-failed": "35-failed"}
    (tmp_path / "checkpoints" / "30" / "x").write_text("y")
    assert export.find(tmp_path, "newest").step == 20


@pytest.mark.parametrize(
    ("which", "line"),
    [
        ("15", "--step: no intact checkpoint 15 in .* \\(there: 10, 20\\)"),
        ("20", "--step: .*20 is not intact: .*x is corrupt"),
        ("old", "--step: 'old' is neither newest, best, a number"),
        ("best", "--step: no checkpoint in .* was evaluated"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path, which, line):
    made(tmp_path, {10: None, 20: None})
    (tmp_path / "checkpoints" / "20" / "x").write_text("y")
    with pytest.raises(UserError, match=line):
        export.find(tmp_path, which)
    with pytest.raises(UserError, match="--workdir: no checkpoint"):
        export.find(tmp_path / "empty", which)
