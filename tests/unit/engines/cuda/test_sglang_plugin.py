"""The engines `sglang` and `http` as `allocation_mode` and `rollout.addr` name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljax.allocation import Pool
from rljax.engine import allocate, check, find_plugin
from rljax.engines.cuda import plugin as cuda
from rljax.engines.http.remote import normalized
from rljax.errors import UserError
from tests.models import config_of


def test_sglang_samples_over_data_and_tensor_and_nothing_else():
    pools = allocate(config_of(allocation_mode="sglang:d4t2+jax:f4"))
    assert pools.sampler == Pool("sglang", data=4, tensor=2) and pools.learner is not None
    with pytest.raises(UserError, match="sglang"):
        allocate(config_of(allocation_mode="sglang:d4p2+jax:f4"))
    with pytest.raises(UserError, match="learn"):
        allocate(config_of(allocation_mode="jax:d1+sglang:d1"))


def test_an_address_takes_the_place_of_the_sampler_and_its_devices():
    config = config_of(**{"allocation_mode": "sglang:d4+jax:f4", "rollout.addr": "10.0.0.1:30000, http://b:1"})
    pools = allocate(config)
    assert pools.sampler is not None and pools.sampler.engine == "http"
    assert pools.learner is not None and pools.learner.first_device == 0
    check(config, pools)
    for name in ("sglang", "http"):
        with pytest.raises(UserError, match="cannot learn"):
            find_plugin(name).make_learner(config, Pool(name), Path())


@pytest.mark.parametrize("address", ["", "host name:1", "http://", "http://a/b", "a:b", "a:123456", "ftp://a:1", "x y"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UserError, match=r"rollout\.addr"):
        normalized(address)


def test_too_old_an_sglang_is_refused_before_anything_starts(monkeypatch):
    config = config_of(allocation_mode="sglang:d1+jax:d1")
    monkeypatch.setattr(cuda, "installed_release", lambda python: (0, 5, 9))
    with pytest.raises(UserError, match=r"0\.5\.9 is too old"):
        check(config, allocate(config))
