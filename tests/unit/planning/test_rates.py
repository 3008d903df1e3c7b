"""The time of a step, by the side that is slower, and the split of the devices that balances them."""

import pytest

from rljax.chips import Topology
from rljax.errors import UserError
from rljax.launching.hosts import host_of
from rljax.planning.balance import balanced
from rljax.planning.text import Report
from tests.unit.planning.plans import plan_of


def test_the_side_that_is_slower_keeps_the_other_waiting():
    fast = plan_of("sglang:d7+fsdp:f1", shape="qwen3-1.7b").rates
    slow = plan_of("sglang:d1+fsdp:f7", shape="qwen3-1.7b", **{"gconfig.max_new_tokens": 512}).rates
    assert fast.waits == "sampler" and fast.step_seconds == fast.learner_seconds
    assert slow.step_seconds == max(slow.learner_seconds, slow.sampler_seconds)
    shared = plan_of("sglang:d1|fsdp:d1", shape="qwen3-1.7b", **{"sglang.mem_fraction_static": 0.3}).rates
    assert shared.step_seconds == shared.learner_seconds + shared.sampler_seconds and not shared.waits


@pytest.mark.parametrize(("mode", "keys"), [("sglang:d7+fsdp:f1", {}), ("sglang:d1+fsdp:f7", {}), ("jax:f4+jax:f4", {})])
def test_the_balanced_split_is_the_fastest_of_those_that_fit(mode, keys):
    shape = "llama3.1-8b"
    sampler, learner = (pool.split(":") for pool in mode.split("+"))
    steps = {}
    for count in range(1, 8):
        split = f"{sampler[0]}:{sampler[1][0]}{count}+{learner[0]}:{learner[1][0]}{8 - count}"
        try:
            each = plan_of(split, shape=shape, **keys)
        except UserError:  # jax:f3 of 4096
            continue
        if each.fits:
            steps[str(each.allocation)] = each.rates.step_seconds
    found = balanced(plan_of(mode, shape=shape, **keys))
    assert found.rates.step_seconds == min(steps.values()) == steps[str(found.allocation)]


@pytest.mark.parametrize(("topology", "host"), [("h100:24", 8), ("v6e:4x4", 4)])
def test_of_several_hosts_the_balanced_split_gives_each_to_one_side(topology, host):
    engine = "jax" if topology.startswith("v6e") else "sglang"
    mode = f"{engine}:d{host}+{'jax' if engine == 'jax' else 'fsdp'}:f{host}"
    found = balanced(plan_of(mode, shape="qwen3-1.7b", topology=topology), host_of(Topology.parse(topology)))
    assert host_of(Topology.parse(topology)) == host
    assert found.allocation.sampler.size % host == found.allocation.learner.size % host == 0
    assert found.allocation.devices == Topology.parse(topology).devices


def test_no_split_is_balanced_where_none_fits_or_the_sides_share_their_devices():
    large = plan_of("jax:f8+jax:f8", shape="qwen3-32b", topology="v6e:4x4")
    assert large.rates.waits and balanced(large) is None and "no split of the 16 devices fits" in str(Report.of(large))
    assert balanced(plan_of("jax:f8", shape="qwen3-0.6b")) is None


def test_device_hours_are_those_of_all_devices_and_steps():
    rates = plan_of("sglang:d4+fsdp:f4", total_train_steps=90).rates
    assert rates.device_hours == pytest.approx(90 * rates.step_seconds * 8 / 3600)
    assert plan_of("sglang:d4+fsdp:f4").rates.device_hours is None
