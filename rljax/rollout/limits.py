"""Limits of the buffer, and the number of steps of a run."""

from __future__ import annotations

import math

from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.rollout.buffer import Buffer, Limits

LEAST_SHARE = 0.1  # of the prompts that a run over whole epochs has to train on, to count as finished


def limits_of(config: Config, prompts_per_epoch: int) -> Limits:
    """Returns the buffer's limits. Epochs and steps both bound a run; the first reached ends it."""
    steps = config.total_train_steps
    return Limits(
        max_lag=config.rollout.max_head_offpolicyness,
        batch_size=config.batch_size,
        max_concurrent=config.max_in_flight,
        prompts=config.total_train_epochs * prompts_per_epoch,
        groups=None if steps is None else steps * config.batch_size,
        stale_policy=config.rollout.stale_policy,
    )


def require_step(config: Config, prompts_per_epoch: int) -> None:
    """Checks that the prompts of all epochs fill one step. Raises UserError."""
    prompts, size = config.total_train_epochs * prompts_per_epoch, config.batch_size
    if prompts >= size or config.total_train_steps == 0:
        return
    key = "rollout.consumer_batch_size" if size != config.train_dataset.batch_size else "train_dataset.batch_size"
    raise UserError(
        f"{key}: a step takes {size} prompts, and total_train_epochs={config.total_train_epochs} of {prompts_per_epoch} has "
        f"{prompts} (a batch of {prompts} at most, or total_train_epochs={math.ceil(size / prompts_per_epoch)} or more)"
    )


def supervised_total(config: Config, prompts_per_epoch: int) -> int:
    """Returns the number of supervised steps of a run: those of the warm-up, or all of SFT."""
    return total_steps(config, prompts_per_epoch) if config.actor.loss == "sft" else config.warmup.steps


def total_steps(config: Config, prompts_per_epoch: int) -> int:
    """Returns the number of steps of a run if no prompt is rejected, warm-up steps included."""
    limits = limits_of(config, prompts_per_epoch)
    assert limits.prompts is not None
    steps = math.ceil(limits.prompts / limits.batch_size)
    if config.total_train_steps is not None:
        steps = min(steps, config.total_train_steps)
    return steps if config.actor.loss == "sft" else steps + config.warmup.steps


def failed_at_the_end(buffer: Buffer) -> int:
    """Counts the prompts at the end of the data that failed one after the other.

    0 if they may be at fault themselves: one alone, or fewer than the groups of the last step.
    """
    last = len(buffer.dropped_last)
    all_of_a_step = last >= buffer.limits.batch_size or buffer.consumed % buffer.limits.batch_size == 0
    return last if last > 1 and all_of_a_step else 0


def shortfall(buffer: Buffer) -> tuple[str, bool]:
    """Describes what a run that ends did not train on.

    Returns:
      One line, empty if nothing is missing, and whether the run is incomplete: it has fewer steps
      than it was asked for, its last groups failed one after the other or, where epochs bound it,
      it trained on less than LEAST_SHARE of the prompts. Prompts that a filter rejects are no
      shortfall of an epoch otherwise.
    """
    limits, counts = buffer.limits, buffer.counts
    assert limits.prompts is not None
    by_steps = limits.groups is not None and limits.groups < limits.prompts
    asked = limits.groups if by_steps and limits.groups is not None else limits.prompts
    if buffer.consumed >= asked:
        return "", False
    lost = [f"{counts[name]} {name}" for name in ("rejected", "dropped") if counts[name]]
    line = f"trained on {buffer.consumed} of {asked} groups, as the {limits.prompts} prompts ran out ({', '.join(lost)})"
    if failed := failed_at_the_end(buffer):
        line += f", the last {failed} one after the other"
    return line, bool(failed) or by_steps or buffer.consumed < LEAST_SHARE * asked
