"""Tokens per second and model FLOPs utilization (MFU) of a learner, as metrics."""

from __future__ import annotations

from rljax.metrics.mean import Mean

# Peak dense bfloat16 FLOP/s of a device as its maker says, by what its name contains; the first that matches.
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
    ("TPU7x", 2307e12),
)


def peak_flops(device: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device by name, as jax and torch spell it; None where it is not
    known.
    """
    return next((peak for name, peak in PEAKS if name in device), None)


def throughput(phase: str, tokens: int, flops: float, seconds: float, device: str, devices: int) -> dict[str, Mean]:
    """`timeperf/<phase>_tokens_per_s`, and `timeperf/<phase>_mfu` of the devices' peak where it is
    known.

    Both are sums over seconds, so that several updates of a step merge into the rate over all of
    them.
    """
    found = {f"timeperf/{phase}_tokens_per_s": Mean(tokens, seconds)}
    peak = peak_flops(device)
    return found if peak is None else found | {f"timeperf/{phase}_mfu": Mean(flops, seconds * peak * devices)}
