"""Settings that a config leaves to the platform."""

import dataclasses

import jax
import pytest

from rljax.backends.jax.sharding import single_device_mesh
from rljax.engines.jax import tuning
from rljax.engines.jax.tuning import ANY, TUNINGS, Tuning, padded_length, unrolled
from rljax.hf.spec import ModelSpec
from rljax.testing import models
from rljax.testing.learner_batches import config_of


@pytest.fixture(scope="module")
def mesh():
    return single_device_mesh()


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return ModelSpec.from_directory(models.make_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("per_octave", [2, 4])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 40, 48, 49, 1000, 4096])
def test_rows_are_padded_by_less_than_a_step_of_their_octave(length, per_octave, mesh, monkeypatch):
    monkeypatch.setitem(TUNINGS, "cpu", Tuning(lengths_per_octave=per_octave))
    padded = padded_length(length, mesh)
    assert max(length, 32) <= padded <= max((1 + 1 / per_octave) * length, 32)
    assert padded_length(padded, mesh) == padded


@pytest.mark.parametrize("per_octave", [2, 4])
def test_an_octave_has_as_many_lengths_as_are_compiled_for(per_octave, mesh, monkeypatch):
    monkeypatch.setitem(TUNINGS, "cpu", Tuning(lengths_per_octave=per_octave))
    assert len({padded_length(length, mesh) for length in range(65, 129)}) == per_octave


@pytest.mark.parametrize("most", [0, 7, ANY])
def test_layers_are_unrolled_up_to_the_platforms_depth_where_activations_are_kept(most, spec, mesh, monkeypatch):
    monkeypatch.setitem(TUNINGS, "cpu", Tuning(unrolled_layers=most))
    for layers in (1, 7, 8):
        deep = dataclasses.replace(spec, num_layers=layers)
        assert unrolled(config_of(), deep, "none", mesh) == (layers <= most)
        assert not unrolled(config_of(), deep, "full", mesh)
        assert unrolled(config_of(**{"jax.unroll": True}), deep, "full", mesh)
        assert not unrolled(config_of(**{"jax.unroll": False}), deep, "none", mesh)


@pytest.mark.parametrize(
    ("platforms", "plugins", "kept"), [("cpu", ["cuda"], 1), ("cuda,cpu", [], 0), (None, [], 1), (None, ["cuda"], 0)]
)
def test_freed_memory_is_kept_where_the_cpu_computes(platforms, plugins, kept, monkeypatch):
    calls = []
    monkeypatch.setattr(tuning, "keep_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(tuning.importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(tuning.importlib.util, "find_spec", lambda name: None)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        tuning.prepare_host()
    finally:
        jax.config.update("jax_platforms", before)
    assert len(calls) == kept
