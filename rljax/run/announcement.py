"""Announcement of a run: a few lines about it that are said before its first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from rljax.config.learning_rate import describe_change
from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.hf.read_model import read_model
from rljax.hf.tensors import parameter_count
from rljax.rollout.buffer import Buffer
from rljax.run.parts import Run

log = logging.getLogger(__name__)


def say_what(
    config: Config,
    workdir: Path,
    model_dir: Path,
    *,
    saved: int | None,
    prompts: int,
    skipped: int,
    held_out: int,
    asked: int | None,
) -> None:
    """Says which model learns from what, for how many steps, and where that is written.

    Args:
      config: resolved, with the steps that the run will have.
      saved: step of the newest checkpoint; None without one.
      prompts: per epoch.
      skipped: prompts that train_dataset.max_length leaves out.
      held_out: prompts that are evaluated on.
      asked: total_train_steps as the user set it.
    """
    sft = config.actor.loss == "sft"
    steps = config.total_train_steps or 0
    kind = f"supervised steps of {config.batch_size} examples"
    if not sft:
        kind = f"steps of {config.batch_size} prompts x {config.gconfig.n_samples} samples"
    warmup = f"{config.warmup.steps} warm-up steps, " if config.warmup.steps and not sft else ""
    ends = f" (total_train_epochs={config.total_train_epochs} ends it before total_train_steps={asked})"
    log.info("run: %s%s", workdir.resolve(), "" if saved is None else f", to go on from step {saved}")
    log.info("model: %s", describe_model(config, model_dir))
    out = f" ({skipped} more are longer than train_dataset.max_length and left out)" if skipped else ""
    log.info("data: %d prompts%s, %d to evaluate on", prompts, out, held_out)
    log.info("steps: %s%d %s%s", warmup, steps, kind, ends if asked is not None and steps < asked else "")


def say_where(config: Config, devices: Sequence[str]) -> None:
    """Says on which devices the run works.

    Args:
      devices: their names as the engines know them; empty where they don't tell.
    """
    named = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    log.info("devices: %s%s", config.allocation_mode, f" on {named}" if named else "")


def warn_of_another_rate(run: Run, buffer: Buffer, *, supervised_steps: int, total_steps: int) -> None:
    """Warns if the learning rate changes because a run goes on to another number of steps.

    Args:
      supervised_steps: finished ones.
      total_steps: of the run as it is now, those that rollbacks cost included.
    """
    config, before = run.config, run.before
    if before is None or before.total_steps is None:
        return
    sft = config.actor.loss == "sft"
    warmup, updates = (0, 1) if sft else (config.warmup.steps, config.actor.ppo_n_minibatches)
    totals = [total - buffer.undone - warmup for total in (before.total_steps, total_steps)]
    done = supervised_steps if sft else buffer.version - buffer.undone
    done, was, now = (count * updates for count in (done, *totals))
    if line := describe_change(config.actor.optimizer, "actor.optimizer", done=done, before=was, now=now):
        log.warning("%s", line)


def describe_model(config: Config, model_dir: Path) -> str:
    """Returns a model's origin, and its family and number of parameters where rljax knows it."""
    origin = "made from scratch" if config.actor.init_from_scratch else config.actor.path
    adapters = f", adapters of rank {config.actor.lora.rank}" if config.actor.lora.rank else ""
    try:
        spec = read_model(model_dir)
    except UserError:  # an engine's own format
        return f"{origin}{adapters}"
    return f"{origin}, {spec.architecture}, {parameter_count(spec) / 1e6:.4g}M parameters{adapters}"
