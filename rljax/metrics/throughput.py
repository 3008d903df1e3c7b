"""Tokens per second and model FLOPs utilization (MFU) of a learner, as metrics."""

from __future__ import annotations

from rljax.metrics.mean import Mean

# Peak dense bfloat16 FLOP/s according to the vendor, by a part of the device name; the first match counts.
PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
    ("TPU7x", 1153.5e12),  # of a device; a chip is two
)


def peak_flops(device: str) -> float | None:
    """Returns the peak bfloat16 FLOP/s of a device; None if it is unknown.

    Args:
      device: name of the device, as jax and torch report it.
    """
    return next((peak for name, peak in PEAKS if name in device), None)


def throughput(phase: str, tokens: int, flops: float, seconds: float, device: str, devices: int) -> dict[str, Mean]:
    """Returns `timeperf/<phase>_tokens_per_s`, and `timeperf/<phase>_mfu` if the peak is known.

    Both are sums over seconds, so the updates of a step merge into the rate over all of them.

    Args:
      flops: model FLOPs of the phase, on all devices.
      device, devices: name of the devices, and their number.
    """
    metrics = {f"timeperf/{phase}_tokens_per_s": Mean(tokens, seconds)}
    peak = peak_flops(device)
    return metrics if peak is None else metrics | {f"timeperf/{phase}_mfu": Mean(flops, seconds * peak * devices)}
