"""Learning rate over a run, by optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable

from rljax.config.schema import OptimizerConfig
from rljax.errors import UserError

SCHEDULES = ("constant", "linear", "cosine")
Schedule = Callable[[int], float]


def make_schedule(config: OptimizerConfig, total_steps: int | None, key: str) -> Schedule:
    """Returns the learning rate as a function of the optimizer step, counted from 0.

    It rises linearly over the first `warmup_steps_proportion` of the run, reaching `lr` at the last
    of those steps. Then it falls towards `lr * min_lr_ratio`, which it would reach one step after
    the last of the run, so that no step has a rate of 0; or it stays if "constant".

    Args:
      total_steps: optimizer steps of the run; None if not known, which only a constant rate allows.
      key: config key of `config`, for messages.
    """
    kind, peak, floor = config.lr_scheduler_type, config.lr, config.min_lr_ratio
    if kind not in SCHEDULES:
        raise UserError(f"{key}.lr_scheduler_type: no schedule named {kind!r} (one of {', '.join(SCHEDULES)})")
    if kind == "constant" and config.warmup_steps_proportion == 0:
        return lambda step: peak
    if total_steps is None:
        raise UserError(f"total_train_steps: needed for the schedule of {key} (set it, or use a constant rate without warmup)")
    warmup = round(config.warmup_steps_proportion * total_steps)
    decay = max(total_steps - max(warmup - 1, 0), 1)  # steps from the peak to the one after the last

    def rate(step: int) -> float:
        if step < warmup - 1:
            return peak * (step + 1) / warmup
        done = min((step - max(warmup - 1, 0)) / decay, 1.0)
        if kind == "constant":
            return peak
        left = 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return peak * (floor + (1 - floor) * left)

    return rate


def describe_change(config: OptimizerConfig, key: str, *, done: int, before: int, now: int) -> str:
    """Describes what becomes of the rate of a run that goes on to another number of steps.

    Args:
      config: the one to go on with. Of the earlier one nothing is known, so both rates are of this.
      done: optimizer steps taken.
      before, now: optimizer steps of the whole run, as it was planned and as it is.

    Returns one line; empty if the rate is what it would have been, or no step is left.
    """
    if not 0 < done < now or before == now or not before:
        return ""
    was, becomes = make_schedule(config, before, key), make_schedule(config, now, key)
    if was(done) == becomes(done) and done < before:
        return ""
    return (
        f"{key}: the {config.lr_scheduler_type} schedule now ends at optimizer step {now}, not {before}: with lr"
        f" {config.lr:.4g} the last step's rate is {was(done - 1):.4g} by the old end,"
        f" the next one's {becomes(done):.4g} by the new"
    )
