"""Checks which keys of the config have changed since the last run in the same workdir.

Keys that say how to go on may change; keys that say what was done may not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.errors import UserError

# Keys that may not change, and why. A trailing dot includes all keys below it.
FIXED: Mapping[str, str] = {
    "seed": "prompts and samples are drawn with it",
    "rollout.consumer_batch_size": "steps are counted in batches of it, which is train_dataset.batch_size unless it is set",
    "warmup.steps": "they are done before the first step of reinforcement",
    "warmup.batch_size": "examples are counted in batches of it",
    "actor.init_from_scratch": "the checkpoints are of that model",
    "actor.init.": "the checkpoints are of that model",
    "actor.lora.rank": "the checkpoints are of those weights",
    "actor.lora.target_modules": "the checkpoints are of those weights",
    "actor.optimizer.type": "the checkpoints hold its moments",
}
REWARD = "eval-rollout/reward"  # scores the checkpoints of a run without evaluator.best

# Keys that may change, but not between kinds of values.
KINDS: Mapping[str, tuple[Callable[[Any], object], str]] = {
    "actor.loss": (lambda word: word == "sft", "supervised steps are no steps of reinforcement"),
    "actor.adv_estimator": (lambda word: word == "gae", "the checkpoints hold a critic, or none"),
    "evaluator.best": (lambda metric: metric or REWARD, f"the checkpoints are scored by it ({REWARD} where it is not set)"),
    "actor.kl_ctl": (lambda weight: weight > 0, "the checkpoints hold the policy as the warm-up left it, or don't"),
}

log = logging.getLogger(__name__)


def check(path: Path, config: Config) -> None:
    """Compares with the config.json of the run that goes on, and logs the changes in one line.

    Args:
      path: config.json of that run; without such a file nothing is compared, and neither with a
        damaged one, which is said.
      config: the config to go on with.

    Raises:
      UserError: a key has changed that may not.
    """
    try:
        before = _flat(json.loads(path.read_text()))
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError, AttributeError):
        log.warning("%s can't be read, so that nothing tells whether keys changed that may not, as seed", path)
        return
    now = _flat(json.loads(config_io.to_json(config)))
    changed = [key for key in now if key in before and before[key] != now[key]]  # keys come and go with releases
    for key in changed:
        if key == "actor.kl_ctl" and not config.warmup.steps:
            continue  # the reference is the model directory's, which is still there
        if reason := _forbidden(key, before[key], now[key]):
            raise UserError(
                f"{key}: {before[key]!r} in the run that {path.parent} holds, now {now[key]!r}: it may not change,"
                f" for {reason} (set it back, or another --workdir)"
            )
    if changed:
        changes = ", ".join(f"{key} {before[key]!r} -> {now[key]!r}" for key in changed)
        log.warning("the run goes on with another config: %s", changes)


def _forbidden(key: str, before: Any, now: Any) -> str:
    """Returns the reason why a change is not allowed; empty if it is."""
    for fixed, reason in FIXED.items():
        if key == fixed or (fixed.endswith(".") and key.startswith(fixed)):
            return reason
    kind, reason = KINDS.get(key, (lambda word: None, ""))
    return reason if kind(before) != kind(now) else ""


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a nested mapping to dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
