"""Tokens per second and model FLOPs utilization (MFU) of a learner, as metrics."""

from __future__ import annotations

from rljax.chips import chip_of
from rljax.metrics.mean import Mean


def peak_flops(device: str) -> float | None:
    """Returns the peak bfloat16 FLOP/s of a device; None if it is unknown.

    Args:
      device: name of the device, as jax and torch report it.
    """
    chip = chip_of(device)
    return None if chip is None else chip.flops


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
