"""Portable state of a learner, by which a run resumes under another engine.

    part              contents                                      present
    params            the policy: all of it, or the LoRA adapters   always
    mu, nu            Adam's moments of params                      once RL (or SFT) has begun
    supervised/mu     Adam's moments of the warm-up                 during the warm-up
    supervised/nu                                                   with supervised/mu
    critic/params     the critic, including its head                with GAE, once RL has begun
    critic/mu         Adam's moments of the critic                  with critic/params
    critic/nu                                                       with critic/params
    reference         the frozen reference policy, like params      with kl_ctl, RL after a warm-up
    counts            optimizer steps: actor, critic, supervised    always

Without a warm-up the reference policy is the initial model, and is not saved.
A part consists of numpy arrays on the host, named and shaped as in a HF file. An adapter's factors
are lora_A.weight [rank, inputs] and lora_B.weight [outputs, rank] after the projection's name. The
critic's head is `value_head` [hidden].

meta.json of a learner's checkpoint gives its format, model, adapters, phases and updates. If a
learner finds the format of another engine, that engine's plugin reads the checkpoint into parts
(`Plugin.read_checkpoint`), and the learner loads those.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rljax.config.schema import Config
from rljax.engine import Plugin, PortableState, portable_plugin
from rljax.errors import UserError

COUNTS = "counts"
VALUE_HEAD = "value_head"


class LazyState(Mapping[str, Mapping[str, np.ndarray]]):
    """A `PortableState` that reads each part when it is asked for, and keeps the last one in memory.

    Example: LazyState(["params", "counts"], lambda part:
    read(part))["params"]["model.norm.weight"]
    """

    def __init__(self, names: Collection[str], read: Callable[[str], Mapping[str, np.ndarray]]) -> None:
        self._names, self._read = list(names), read
        self._kept: tuple[str, Mapping[str, np.ndarray]] | None = None

    def __getitem__(self, name: str) -> Mapping[str, np.ndarray]:
        if name not in self._names:
            raise KeyError(name)
        if self._kept is None or self._kept[0] != name:
            self._kept = None  # two are never in memory at once
            self._kept = name, self._read(name)
        return self._kept[1]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def check_origin(directory: Path, meta: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Checks that a checkpoint can be loaded by a learner.

    Args:
      meta: meta.json of the checkpoint.
      identity: the learner's own format, which the checkpoint need not have, and values that must
        be equal in both.

    Raises:
      UserError: no installed engine reads the format, or the model or the adapters differ.
    """
    if meta.get("format") != identity["format"]:
        _reader(directory, meta)
    for key, value in identity.items():
        if key != "format" and meta.get(key) != value:
            raise UserError(f"checkpoint: {directory} is of another {key}: {meta.get(key)}, not {value} (use its own config)")


def _reader(directory: Path, meta: Mapping[str, Any]) -> Plugin:
    format_ = meta.get("format")
    plugin = portable_plugin(str(format_))
    if plugin is None:
        remedy = "go on with the engine that wrote it"
        raise UserError(f"checkpoint: {directory} has the format {format_!r}, which no installed engine reads ({remedy})")
    return plugin


def read_foreign(directory: Path, meta: Mapping[str, Any], config: Config) -> PortableState:
    """Reads the checkpoint of another engine's learner.

    Raises:
      UserError: no installed engine reads its format, it is corrupt, or its parts are not those of
        a learner of this config.
    """
    state = _reader(directory, meta).read_checkpoint(directory)
    present, expected = set(state) - {COUNTS}, _expected_parts(config, meta["phases"])
    for part in sorted(present ^ expected):
        fault = f"it has {part}, which this config does not use" if part in present else f"it has no {part}"
        raise UserError(f"checkpoint: {directory} is of another run: {fault} (use the config it was written with)")
    return state


def phases_of(state: PortableState) -> tuple[bool, bool]:
    """Returns (whether a state is of a warm-up, whether RL has begun).

    Both are False before the first optimizer step.
    """
    supervised = "supervised/mu" in state
    new = COUNTS in state and not state[COUNTS]
    return supervised, "mu" in state or not (supervised or new)


def _expected_parts(config: Config, phases: Collection[str]) -> set[str]:
    """Returns the parts of a learner of this config in these phases."""
    parts = {"params"}
    if "supervised" in phases:
        parts |= {"supervised/mu", "supervised/nu"}
    if "rl" in phases:
        parts |= {"mu", "nu"}
        if config.actor.adv_estimator == "gae":
            parts |= {"critic/params", "critic/mu", "critic/nu"}
        if config.actor.kl_ctl > 0 and config.warmup.steps > 0:
            parts |= {"reference"}
    return parts
