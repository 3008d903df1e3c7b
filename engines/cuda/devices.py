"""Counts this machine's GPUs without torch, and holds an allocation against them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rljax.config.allocation import Allocation
from rljax.errors import UserError

DRIVER = Path("/proc/driver/nvidia/gpus")  # has an entry for each GPU


def visible_gpus(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of GPUs that this process may use; None if there is none, or unknown."""
    names = environment.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return len([name for name in names.split(",") if name.strip() not in ("", "-1")]) or None
    return (len(list(DRIVER.iterdir())) or None) if DRIVER.is_dir() else None


def check_fit(allocation: Allocation, here: int | None, *, on_host: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses pools that need more GPUs than this machine has.

    Args:
      here: GPUs of this machine; None if unknown: then nothing is refused.
      on_host: the sampler uses none of them.
      environment: has LOCAL_WORLD_SIZE, the learner's processes on this machine, if a launcher
        started them; each may see one GPU alone then.

    Raises UserError.
    """
    local = environment.get("LOCAL_WORLD_SIZE", "")
    if here is None or (here == 1 and local.isdigit() and int(local) > 1):
        return
    sampler, learner = allocation.sampler, allocation.learner
    ends = [] if sampler is None or on_host else [sampler.first_device + sampler.size]
    if learner is not None:
        ends.append(learner.first_device + (min(int(local), learner.size) if local.isdigit() else learner.size))
    if max(ends, default=0) > here:
        raise UserError(
            f"allocation_mode: {allocation} needs {max(ends)} devices on this machine, and it has {here}"
            " (fewer, or | between the pools to share them)"
        )
