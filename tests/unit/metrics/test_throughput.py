"""Rates that merge, and the peak that a device is known by."""

import pytest

from rljax.metrics.mean import merge
from rljax.metrics.throughput import peak_flops, throughput


@pytest.mark.parametrize(
    "device, peak",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("cpu", None),
    ],
)
def test_peak_by_name(device, peak):
    assert peak_flops(device) == peak


def test_updates_of_a_step_merge_into_the_rate_over_all_of_them():
    updates = ((30, 4e12, 1), (10, 1e12, 3))
    parts = [throughput("update", tokens, flops, seconds, "NVIDIA H200", 2) for tokens, flops, seconds in updates]
    found = merge(parts)
    assert found["timeperf/update_tokens_per_s"].value == 40 / 4
    assert found["timeperf/update_mfu"].value == pytest.approx(5e12 / (4 * 2 * 989e12))


def test_no_utilization_of_a_peak_that_is_not_known():
    assert set(throughput("update", 1, 1.0, 1.0, "cpu", 1)) == {"timeperf/update_tokens_per_s"}
