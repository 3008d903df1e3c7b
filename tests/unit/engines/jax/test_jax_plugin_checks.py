"""The JAX plugin refuses, before anything starts, what a slot can't hold."""

import dataclasses

import pytest

from rljax import config_io
from rljax.allocation import Allocation, Pool
from rljax.configs import base
from rljax.engines.jax.plugin import PLUGIN
from rljax.errors import UserError


def config_with(context_length: int, max_new_tokens: int, max_length: int | None):
    config = config_io.from_dict(base.get_config())
    return dataclasses.replace(
        config,
        jax=dataclasses.replace(config.jax, context_length=context_length),
        gconfig=dataclasses.replace(config.gconfig, max_new_tokens=max_new_tokens),
        train_dataset=dataclasses.replace(config.train_dataset, max_length=max_length),
    )


@pytest.mark.parametrize(("max_length", "needs"), [(None, 33), (100, 132)])
def test_a_slot_holds_the_longest_prompt_and_completion(max_length, needs):
    ours = Allocation(Pool("jax"), Pool("jax"))
    PLUGIN.check(config_with(needs, 32, max_length), ours)
    with pytest.raises(UserError, match=rf"^jax.context_length: {needs - 1} tokens cannot hold"):
        PLUGIN.check(config_with(needs - 1, 32, max_length), ours)


def test_the_context_of_another_sampler_is_not_ours_to_check():
    PLUGIN.check(config_with(8, 32, None), Allocation(Pool("other"), Pool("jax")))
