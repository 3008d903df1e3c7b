"""The engine `fsdp` in `allocation_mode`, and the processes it finds."""

import re

import pytest
import torch

from rljax.config.allocation import Pool, parse
from rljax.engine import allocate, check, find_plugin
from rljax.engines.cuda import plugin
from rljax.engines.cuda.devices import check_fit, visible_gpus
from rljax.engines.cuda.learning import distributed
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.engines.cuda.transports.broadcast import BroadcastGroup
from rljax.errors import UserError
from rljax.testing import models
from rljax.testing.models import config_of


def test_fsdp_learns_over_data_fsdp_tensor_and_context():
    pools = allocate(config_of(allocation_mode="sglang:d4+fsdp:d2f2t2c2"))
    assert pools.learner == Pool("fsdp", data=2, fsdp=2, tensor=2, context=2, first_device=4)


@pytest.mark.parametrize(("letter", "name"), [("p", "pipeline"), ("e", "expert")])
def test_what_fsdp_cannot_do_is_refused_by_name(letter, name):
    with pytest.raises(UserError, match=f"fsdp has no {name} parallelism"):
        allocate(config_of(allocation_mode=f"sglang:d1+fsdp:d1{letter}2"))


def test_fsdp_does_not_sample_and_has_no_bitwise_mode(tmp_path):
    config = config_of(allocation_mode="fsdp:d1", **{"jax.bitwise": True})
    with pytest.raises(UserError, match=r"jax\.bitwise"):
        check(config, allocate(config))
    with pytest.raises(UserError, match="cannot sample"):
        find_plugin("fsdp").make_sampler(config, Pool("fsdp"), tmp_path)


@pytest.mark.parametrize(
    ("first", "rank", "visible", "local", "device"),
    [
        (4, 3, 8, 4, 7),  # one host: d4 samples on 0 to 3
        (8, 11, 8, 8, 3),  # two hosts of 8: the second one, and the third that follows it
        (5, 0, 1, 4, 0),  # a launcher shows each process its own GPU
        (2, 0, 2, 2, None),  # sglang:d2+fsdp:f2 on one host of 2
        (1, 0, 1, 1, None),  # sglang:d1+fsdp:d1 on one GPU
    ],
)
def test_the_pools_devices_are_counted_over_hosts(monkeypatch, first, rank, visible, local, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name, value in {"RANK": rank, "WORLD_SIZE": 16 if local == 8 else local, "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, str(value))
    if device is None:
        with pytest.raises(UserError, match=f"begins at device {first}, and this machine has {visible}"):
            distributed.device_of(Pool("fsdp", first_device=first))
    else:
        assert distributed.device_of(Pool("fsdp", first_device=first)) == torch.device("cuda", device)


@pytest.mark.parametrize(
    ("mode", "visible", "local", "needed"),
    [
        ("sglang:d2+fsdp:f2", 2, "", 4),
        ("sglang:d2+fsdp:f2", 4, "", None),
        ("sglang:d2|fsdp:f2", 2, "", None),
        ("sglang:d1t4|fsdp:f4", 2, "", 4),
        ("sglang:d2+fsdp:f6", 4, "2", None),  # two hosts or more: two ranks here beside the servers
        ("sglang:d2+fsdp:f6", 3, "2", 4),
        ("sglang:d1+fsdp:f2", 1, "2", None),  # each process sees its own
        ("sglang:d2+fsdp:f2", None, "", None),
    ],
)
def test_pools_that_do_not_fit_the_machine_are_refused(mode, visible, local, needed):
    allocation = parse(mode, find_plugin)
    names = "" if visible is None else ",".join(map(str, range(visible)))
    count = visible_gpus({"CUDA_VISIBLE_DEVICES": names})
    assert count == visible
    environment = {"LOCAL_WORLD_SIZE": local} if local else {}
    if needed is None:
        check_fit(allocation, count, on_host=False, environment=environment)
    else:
        with pytest.raises(UserError, match=f"needs {needed} devices on this machine, and it has {visible}"):
            check_fit(allocation, count, on_host=False, environment=environment)


@pytest.mark.parametrize(
    ("mode", "refusal"),
    [
        ("sglang:d2+jax:f1", "sglang:d2 needs 2"),
        ("jax:d1+fsdp:f2", "jax:d1+fsdp:f2 needs 3"),  # up to its last device
        ("fsdp:f2", "fsdp:f2 needs 2"),
    ],
)
def test_a_run_whose_pools_do_not_fit_is_refused_before_it_starts(monkeypatch, mode, refusal):
    monkeypatch.setattr(plugin, "installed_release", lambda python: plugin.OLDEST)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = config_of(**{"allocation_mode": mode, "gconfig.max_new_tokens": 8})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=f"^allocation_mode: {re.escape(refusal)} devices on this machine, and it has 1"):
        check(config, allocate(config))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    check(config, allocate(config))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    check(config, allocate(config))


@pytest.mark.parametrize("hang_timeout", [120.0, 1800.0, 20000.0])
def test_ranks_wait_for_rank_0_as_long_as_it_waits_for_servers(monkeypatch, tmp_path, hang_timeout):
    """Ranks are in a collective while rank 0 pauses servers, joins them and sends: their limit is longer than that."""
    given = []

    def join(pool, timeout):
        given.append(timeout)
        raise UserError("enough")

    monkeypatch.setattr(distributed, "join", join)
    config = config_of(**{"recover.hang_timeout": hang_timeout})
    group = BroadcastGroup("nccl", wait=config.control_timeout)
    with pytest.raises(UserError, match="enough"):
        TorchLearner(config, Pool("fsdp", fsdp=2), models.make_model(tmp_path))
    assert given[0] > config.control_timeout + group.join_timeout + group.bucket_timeout


def test_processes_that_are_not_there_are_asked_for(monkeypatch):
    distributed.join(Pool("fsdp"))
    with pytest.raises(UserError, match="needs 2 processes, and there are 1"):
        distributed.join(Pool("fsdp", fsdp=2))
    monkeypatch.setenv("RLJAX_LAUNCH", "another start")  # whose other processes would wait for this one
    with pytest.raises(UserError, match="needs 1 processes, and there are 1, those of another learner here"):
        distributed.join(Pool("fsdp"))
