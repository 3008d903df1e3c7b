"""What a learner keeps over time, in no framework's terms: how a run goes on under another engine.

    part                          what                                           there
    params                         the policy: all of it, or the LoRA adapters    always
    mu, nu                         Adam's moments of it                           once RL (or SFT) has begun
    supervised/mu, supervised/nu   those of the warm-up                           in the warm-up
    critic/params                  the critic, its head among them                with adv_estimator gae, once RL has begun
    critic/mu, critic/nu           its moments                                    with it
    reference                      the frozen reference policy, like params       with kl_ctl, once RL has begun after a warm-up
                                                                                  (without one the model directory has it)
    counts                         optimizer steps: actor, critic, supervised     of what there is

A part holds numpy arrays on the host, named and shaped as in a HF file; an adapter's factors are
lora_A.weight [rank, inputs] and lora_B.weight [outputs, rank] after the projection's name, and the
critic's head is `value_head` [hidden].

meta.json of a learner's checkpoint says its format, model, adapters, phases and updates. A learner
that meets the format of another engine has that engine's plugin read it into parts
(`Plugin.read_checkpoint`), and loads those.
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
    """Raises UserError where no installed engine reads a checkpoint, or it is of another model or
    of other adapters.

    Args:
      identity: what the learner writes in its own meta.json: its format, which another engine's
        checkpoint may differ in, and what must be the same.
    """
    if meta.get("format") != identity["format"]:
        _reader(directory, meta)
    for key, value in identity.items():
        if key != "format" and meta.get(key) != value:
            raise UserError(f"checkpoint: {directory} is of another {key}: {meta.get(key)}, not {value} (use its own config)")


def _reader(directory: Path, meta: Mapping[str, Any]) -> Plugin:
    form = meta.get("format")
    plugin = portable_plugin(str(form))
    if plugin is None:
        remedy = "go on with the engine that wrote it"
        raise UserError(f"checkpoint: {directory} has the format {form!r}, which no installed engine reads ({remedy})")
    return plugin


def read_foreign(directory: Path, meta: Mapping[str, Any], config: Config) -> PortableState:
    """What a learner of another engine saved under directory.

    Raises:
      UserError: no installed engine reads its format; it is corrupt; or it holds other things than
        a learner of the config.
    """
    state = _reader(directory, meta).read_checkpoint(directory)
    there, wanted = set(state) - {COUNTS}, _wanted(config, meta["phases"])
    for part in sorted(there ^ wanted):
        where = "there and not here" if part in there else "here and not there"
        raise UserError(f"checkpoint: {directory} is of another run: {part} is {where} (use the config it was written with)")
    return state


def phases_of(state: PortableState) -> tuple[bool, bool]:
    """Whether a state is of a warm-up, and whether RL has begun in it: neither where nothing has
    been counted yet.
    """
    supervised = "supervised/mu" in state
    new = COUNTS in state and not state[COUNTS]
    return supervised, "mu" in state or not (supervised or new)


def _wanted(config: Config, phases: Collection[str]) -> set[str]:
    """The parts that a learner of the config has in these phases."""
    wanted = {"params"}
    if "supervised" in phases:
        wanted |= {"supervised/mu", "supervised/nu"}
    if "rl" in phases:
        wanted |= {"mu", "nu"}
        if config.actor.adv_estimator == "gae":
            wanted |= {"critic/params", "critic/mu", "critic/nu"}
        if config.actor.kl_ctl > 0 and config.warmup.steps > 0:
            wanted |= {"reference"}
    return wanted
