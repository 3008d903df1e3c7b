"""Engines by name: finding them, asking each whether it can do what a config wants, and making the pair.

A third party plugs in by an entry point of the group `rljax.engines`, whose name is the engine's word in `allocation_mode`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rljax import entry_points
from rljax.config.allocation import Allocation, Pool, parse
from rljax.config.schema import Config
from rljax.engine.engine import Engine
from rljax.engine.interface import HostPlugin, Learner, Plugin, PortablePlugin, RoutedPlugin
from rljax.errors import UserError

ATTACHED = "http"  # the engine of servers that run already

log = logging.getLogger(__name__)


def allocate(config: Config) -> Allocation:
    """The pools of `allocation_mode`; with `rollout.addr` the sampler is the servers there, whatever the mode says.

    A learner behind a sampler that takes no devices of this machine has them from the first.

    Raises UserError for a mode that can't be read or done.
    """
    allocation = parse(config.allocation_mode, find_plugin)
    if config.rollout.addr:
        allocation = dataclasses.replace(allocation, sampler=Pool(ATTACHED))
    elif not _on_host(config, allocation.sampler):
        return allocation
    learner = allocation.learner and dataclasses.replace(allocation.learner, first_device=0)
    return dataclasses.replace(allocation, learner=learner)


def _on_host(config: Config, pool: Pool | None) -> bool:
    if pool is None:
        return False
    plugin = find_plugin(pool.engine)
    return isinstance(plugin, HostPlugin) and plugin.on_host(config)


def check(config: Config, allocation: Allocation) -> None:
    """Asks each engine of the allocation whether it can do what the config wants. Raises UserError; starts nothing."""
    # In one order, so that the same config has the same message; a sampler may have to ask another interpreter.
    for name in dict.fromkeys(pool.engine for pool in (allocation.learner, allocation.sampler) if pool):
        find_plugin(name).check(config, allocation)


def require_both(allocation: Allocation) -> tuple[Pool, Pool]:
    """Its sampler and its learner. Raises UserError where it has but one."""
    if allocation.sampler is None or allocation.learner is None:
        learns = allocation.sampler is None
        alone, both = ("learns", f"SAMPLER:d1+{allocation}") if learns else ("samples", f"{allocation}+LEARNER:d1")
        raise UserError(
            f"allocation_mode: {allocation} only {alone}; training needs both, as in {both}"
            f" (with actor.loss=sft too: evaluation samples)"
        )
    return allocation.sampler, allocation.learner


def make_learner(config: Config, pool: Pool, model_dir: Path) -> Learner:
    """The pool's learner, or this process's part of it. Blocks; may compile."""
    return find_plugin(pool.engine).make_learner(config, pool, model_dir)


def build(
    config: Config,
    allocation: Allocation,
    model_dir: Path,
    workdir: Path,
    make_learner: Callable[[Config, Pool, Path], Learner] = make_learner,
) -> Engine:
    """Makes a sampler and a learner from the same model directory. Blocks; both may compile.

    Args:
      workdir: of the run, which this process has for itself; weights are published through a directory named after it.
      make_learner: that of a `Leader`, where the learner may live in several processes (rljax/multiprocess).

    Raises:
      UserError: when the allocation lacks one of them, or no transport leads from one to the other.
    """
    samples, learns = require_both(allocation)
    transport = transport_of(config, allocation)
    learner = make_learner(config, learns, model_dir)
    sampler = find_plugin(samples.engine).make_sampler(config, samples, model_dir)
    return Engine(sampler, learner, transport, scratch(workdir))


def check_lending(config: Config, allocation: Allocation, key: str) -> None:
    """Whether a sampler can lend its memory: to a learner on its devices, in a run that samples or learns. Raises UserError."""
    sampler, learner = allocation.sampler, allocation.learner
    if sampler is None or learner is None or sampler.first_device != learner.first_device:
        raise UserError(f"{key}: is for engines on the same devices (allocation_mode with '|', or one pool)")
    if config.rollout.max_head_offpolicyness:
        raise UserError(f"{key}: is for synchronous runs (rollout.max_head_offpolicyness=0): others sample while they update")


def transport_of(config: Config, allocation: Allocation) -> str:
    """The sampler's best way that the learner has too; arrays in memory are of one engine's own layout.

    Raises UserError where there is none, or only half an engine.
    """
    if allocation.sampler is None or allocation.learner is None:
        raise UserError(f"allocation_mode: {allocation} publishes no weights (a sampler and a learner do)")
    sampler, learner = allocation.sampler.engine, allocation.learner.engine
    taken, given = (_routes(find_plugin(name), config, allocation) for name in (sampler, learner))
    for way in taken:
        if way in given and (way != "memory" or sampler == learner):
            return way
    raise UserError(
        f"allocation_mode: no way for weights from {learner} ({', '.join(given)}) to {sampler} ({', '.join(taken)})"
    )


def _routes(plugin: Plugin, config: Config, allocation: Allocation) -> tuple[str, ...]:
    return plugin.routes(config, allocation) if isinstance(plugin, RoutedPlugin) else plugin.transports


def room_for_prompt(config: Config, allocation: Allocation) -> tuple[int, str]:
    """(tokens that a prompt may have, what allows no more). A sampler ends a completion where its context is full."""
    engine = allocation.sampler.engine if allocation.sampler else ""
    context = find_plugin(engine).context_length(config) if engine else None
    row, new = config.actor.mb_spec.max_tokens_per_row, config.gconfig.max_new_tokens
    if context is not None and context <= row:
        return context - 1, f"{engine}.context_length={context} holds no completion beside it"
    return row - new, f"actor.mb_spec.max_tokens_per_row={row} cannot hold it and gconfig.max_new_tokens={new}"


def scratch(workdir: Path, what: str = "") -> Path:
    """Where weights go on their way, in memory where Linux has a directory there. It is the same for every process of a run:
    what a killed one left is deleted. Not made yet."""
    name = "rljax-" + hashlib.blake2b(str(workdir.resolve()).encode(), digest_size=8).hexdigest() + what
    directory = memory_backed() / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def memory_backed() -> Path:
    """A directory whose files are in memory, where Linux has one."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def find_plugin(name: str) -> Plugin:
    """The engine registered under a name. Raises UserError for an unknown name, or one registered twice."""
    try:
        plugin: Plugin = entry_points.load(name)
    except UserError as error:
        raise UserError(f"allocation_mode: {error}") from error
    return plugin


def portable_plugin(form: str) -> PortablePlugin | None:
    """The installed engine that reads checkpoints of a format, or None."""
    for name in entry_points.names():
        try:
            plugin = find_plugin(name)
        except UserError as error:  # another engine's trouble is not this checkpoint's
            log.warning("the engine %s is passed over: %s", name, error)
            continue
        if isinstance(plugin, PortablePlugin) and form in plugin.formats:
            return plugin
    return None
