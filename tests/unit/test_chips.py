"""Chips and topologies, by the names that people and frameworks have for them."""

import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from rljax.chips import CHIPS, GIB, Topology, chip_of
from rljax.errors import UserError


@pytest.mark.parametrize(("name", "devices"), [("v5e:2x4", 8), ("v5p:4x4x4", 64), ("tpu7x:2x2x1", 8), ("h100:8", 8)])
def test_a_topology_is_its_devices(name, devices):
    assert Topology.parse(name).devices == devices


@pytest.mark.parametrize("name", ["h100", "h100:0", "h10:8", "v5e:2x", "gh200:1", ""])
def test_a_topology_that_is_none_is_refused_by_name(name):
    with pytest.raises(UserError, match="--topology: "):
        Topology.parse(name)


def test_each_chip_is_found_by_the_name_that_its_framework_reports():
    for chip in CHIPS:
        assert chip_of(f"NVIDIA {chip.kind}" if chip.platform == "gpu" else chip.kind) is chip
    assert chip_of("NVIDIA H100 80GB HBM3").memory == 79 * GIB
    assert chip_of("cpu") is None


@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip.platform == "tpu"], ids=lambda chip: chip.name)
def test_a_tpu_is_as_fast_and_as_large_as_jax_has_it(chip):
    version, cores = pallas_tpu.ChipVersion(chip.name.removeprefix("tpu")), 2 if chip.name in ("v4", "v5p") else 1
    info = pallas_tpu.get_tpu_info_for_chip(version, cores)  # of one core
    assert chip.flops == pytest.approx(cores * info.bf16_ops_per_second, rel=0.01)
    assert chip.memory == pytest.approx(cores * info.hbm_capacity_bytes, rel=0.01)
    # Google's page has 2,765 GB/s for v5p, JAX 2,460.
    assert chip.bandwidth == pytest.approx(cores * info.mem_bw_bytes_per_second, rel=0.13 if chip.name == "v5p" else 0.01)
