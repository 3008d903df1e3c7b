"""The engines `sglang` and `http` in `allocation_mode` and `rollout.addr`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rljax.config.allocation import Pool
from rljax.engine import ExportToSampler, allocate, check, find_plugin
from rljax.engines.cuda import plugin as cuda
from rljax.engines.cuda.transports.routes import Route
from rljax.engines.http import remote
from rljax.engines.http.plugin import PLUGIN, TRANSPORTS, attach
from rljax.engines.http.remote import base_url
from rljax.errors import UserError
from rljax.testing.models import config_of


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


@pytest.mark.parametrize("transport", ["nccl", "gloo", "ipc", "directory", ""])
def test_only_a_directory_leads_to_servers_on_other_machines(transport):
    def asked(address):
        settings = {"allocation_mode": "sglang:d1+fsdp:d1", "rollout.addr": address, "sglang.transport": transport}
        config = config_of(**settings)
        return lambda: check(config, allocate(config))

    for here in ("127.0.0.1:1", "localhost:1,127.0.0.2:2", "http://[::1]:7"):
        asked(here)()
    for elsewhere in ("10.0.0.1:1", "127.0.0.1:1,b:2"):
        if transport in ("", "directory"):
            asked(elsewhere)()
        else:
            with pytest.raises(UserError, match=f"^sglang.transport: {transport} needs .*(10.0.0.1:1|b:2) may be on another"):
                asked(elsewhere)()


@pytest.mark.parametrize(("transport", "devices"), [("nccl", 2), ("ipc", 2), ("nccl", 1), ("directory", 2)])
def test_only_a_directory_leads_to_a_running_server_on_several_devices(monkeypatch, transport, devices):
    answers = {
        "/get_model_info": {"model_path": "", "weight_version": "3"},
        "/get_server_info": {"version": "0.5.17", "disable_overlap_schedule": True, "tp_size": devices},
    }
    monkeypatch.setattr(remote, "fetch", lambda base, path, token, timeout: answers[path])
    config = config_of(**{"rollout.addr": "127.0.0.1:1", "sglang.transport": transport})
    if transport == "directory" or devices == 1:
        assert attach(config).version == 3
    else:
        with pytest.raises(UserError, match=f"sglang.transport: {transport} needs .* http://127.0.0.1:1 is on 2"):
            attach(config)


@pytest.mark.parametrize(
    "address",
    ["", "host name:1", "http://", "http://a/b", "a:b", "a:123456", "ftp://a:1", "x y", "a", "[::1]", "a:65536", "a:0"],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UserError, match=r"rollout\.addr"):
        base_url(address)


def test_too_old_an_sglang_is_refused_before_anything_starts(monkeypatch):
    config = config_of(allocation_mode="sglang:d1+jax:d1")
    monkeypatch.setattr(cuda, "installed_release", lambda python: (0, 5, 9))
    with pytest.raises(UserError, match=r"0\.5\.9 is too old"):
        check(config, allocate(config))


@pytest.mark.parametrize(
    ("mode", "device", "best"),
    [
        ("sglang:d1+jax:d1", "", "nccl"),
        ("sglang:d2|jax:d2", "", "ipc"),  # NCCL wants a device a rank
        ("sglang:d1+jax:d1", "cpu", "gloo"),
        ("sglang:d1|jax:d1", "cpu", "gloo"),
    ],
)
def test_the_best_way_for_weights_depends_on_where_they_go(mode, device, best):
    config = config_of(**{"allocation_mode": mode, "sglang.device": device})
    possible = cuda.SGLANG.routes(config, allocate(config))
    assert possible[0] == best and possible[-1] == "directory"
    for way in possible:
        wanted = config_of(**{"allocation_mode": mode, "sglang.device": device, "sglang.transport": way})
        assert cuda.SGLANG.routes(wanted, allocate(wanted)) == (way,)
    for way in {*TRANSPORTS, "pigeon"} - set(possible):
        wanted = config_of(**{"allocation_mode": mode, "sglang.device": device, "sglang.transport": way})
        with pytest.raises(UserError, match=rf"^sglang\.transport: .*{way}"):
            cuda.SGLANG.routes(wanted, allocate(wanted))


def test_weights_reach_a_server_that_runs_already_by_directory_unless_its_user_knows_better():
    address = {"rollout.addr": "127.0.0.1:1", "allocation_mode": "sglang:d1+jax:d1"}
    for changes, ways in (({}, ("directory",)), ({"sglang.transport": "nccl"}, ("nccl",))):
        config = config_of(**address, **changes)
        assert PLUGIN.routes(config, allocate(config)) == ways


def test_a_learner_has_the_devices_from_the_first_when_sglang_takes_none():
    for device, first in (("", 2), ("cpu", 0)):
        pools = allocate(config_of(**{"allocation_mode": "sglang:d2+jax:d1", "sglang.device": device}))
        assert pools.learner is not None and pools.learner.first_device == first


def test_each_way_out_of_memory_is_a_source_of_its_own():
    pytest.importorskip("torch")
    from rljax.engines.cuda.transports.broadcast import TorchBroadcast
    from rljax.engines.cuda.transports.ipc import TorchIpc

    pool = Pool("sglang", data=2, tensor=2)
    shared = Route(ExportToSampler("ipc", pool)).source([]).sender
    assert isinstance(shared, TorchIpc) and shared.tensor == 2
    route = Route(ExportToSampler("gloo", pool))
    first, second = (route.source([]).sender for _ in range(2))
    assert isinstance(first, TorchBroadcast) and first.group is second.group and first.group.tensor == 2
    with pytest.raises(UserError, match=r"^sglang\.transport: directory"):
        Route(ExportToSampler("directory", pool)).source([])


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"allocation_mode": "sglang:d1+jax:d1"}, "same devices"), ({"rollout.max_head_offpolicyness": 1}, "synchronous")],
)
def test_memory_is_lent_by_synchronous_runs_on_the_same_devices_alone(monkeypatch, changes, why):
    monkeypatch.setattr(cuda, "installed_release", lambda python: (0, 5, 23))
    able = {"allocation_mode": "sglang:d1|jax:d1", "rollout.max_head_offpolicyness": 0, "sglang.release_memory": True}
    config = config_of(**able)
    check(config, allocate(config))
    alone = config_of(**{"jax.release_memory": True, "rollout.max_head_offpolicyness": 0, "train_dataset.max_length": 8})
    alone = dataclasses.replace(alone, gconfig=dataclasses.replace(alone.gconfig, max_new_tokens=8))
    check(alone, allocate(alone))
    with pytest.raises(UserError, match=r"^jax\.release_memory: .*synchronous"):
        check(asynchronous := dataclasses.replace(alone, rollout=config_of().rollout), allocate(asynchronous))
    refused = config_of(**(able | changes))
    with pytest.raises(UserError, match=rf"^sglang\.release_memory: .*{why}"):
        check(refused, allocate(refused))
