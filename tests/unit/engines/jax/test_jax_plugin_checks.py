"""The JAX plugin refuses, before anything starts, what a slot can't hold."""

import dataclasses
import json

import pytest

from rljax.config import io as config_io
from rljax.config.allocation import Allocation, Pool
from rljax.configs import base
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.plugin import PLUGIN
from rljax.errors import UserError
from rljax.testing import models


def config_with(context_length: int, max_new_tokens: int, max_length: int | None):
    config = config_io.from_dict(base.get_config())
    return dataclasses.replace(
        config,
        engines={"jax": JaxConfig(context_length=context_length)},
        gconfig=dataclasses.replace(config.gconfig, max_new_tokens=max_new_tokens),
        train_dataset=dataclasses.replace(config.train_dataset, max_length=max_length),
    )


@pytest.mark.parametrize(("max_length", "needs"), [(None, 33), (100, 132)])
def test_a_slot_holds_the_longest_prompt_and_completion(max_length, needs):
    ours = Allocation(Pool("jax"), Pool("jax"))
    PLUGIN.check(config_with(needs, 32, max_length), ours)
    with pytest.raises(UserError, match=rf"^jax.context_length: {needs - 1} tokens cannot hold"):
        PLUGIN.check(config_with(needs - 1, 32, max_length), ours)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),  # Qwen's way: 256 stays
        ({"rope_type": "linear", "factor": 4.0}, 256),  # the model's own length is the stretched one
    ],
)
def test_a_context_within_the_positions_of_the_model(scaling, positions, tmp_path):
    directory = models.make_model(tmp_path)
    described = json.loads((directory / "config.json").read_text())
    described["rope_parameters"] = {"rope_theta": 10000.0} | scaling
    (directory / "config.json").write_text(json.dumps(described))
    ours = Allocation(Pool("jax"), Pool("jax"))

    def config_of(context: int, **actor):
        config = config_with(context, 8, None)
        return dataclasses.replace(config, actor=dataclasses.replace(config.actor, **actor))

    PLUGIN.check(config_of(positions, path=str(directory)), ours)
    with pytest.raises(UserError, match=rf"^jax.context_length: {positions + 1} tokens .* the {positions} positions"):
        PLUGIN.check(config_of(positions + 1, path=str(directory)), ours)
    PLUGIN.check(config_of(512, init_from_scratch=True), ours)
    with pytest.raises(UserError, match=r"513 tokens .*\(actor\.init\.max_position_embeddings"):
        PLUGIN.check(config_of(513, init_from_scratch=True), ours)


def test_compiled_programs_are_kept_where_the_config_says(monkeypatch, tmp_path):
    import jax

    kept = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr("rljax.engines.jax.learning.learner.JaxLearner", lambda *arguments: arguments)
    config = config_with(64, 8, None)
    try:
        PLUGIN.make_learner(config, Pool("jax"), tmp_path)
        assert jax.config.jax_compilation_cache_dir == kept
        config = config_io.changed(config, [("jax.compilation_cache", str(tmp_path))])
        PLUGIN.make_learner(config, Pool("jax"), tmp_path)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)


def test_the_context_of_another_sampler_is_not_ours_to_check():
    PLUGIN.check(config_with(8, 32, None), Allocation(Pool("other"), Pool("jax")))
