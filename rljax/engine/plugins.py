"""Engines by name: discovery, checks, and making the pair of sampler and learner.

A third party plugs in by an entry point of the group `rljax.engines`, whose name is the engine's
name in `allocation_mode`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from rljax import entry_points
from rljax.config.allocation import Allocation, Pool, parse
from rljax.config.schema import Config
from rljax.engine.engine import Engine
from rljax.engine.interface import Learner, Sampler
from rljax.engine.plugin import Plugin
from rljax.engine.storage import private_directory, publish_parent
from rljax.engine.weights import ExportToSampler
from rljax.errors import UserError
from rljax.process.stages import stage

DIRECTORY, MEMORY = "directory", "memory"  # transports with the same meaning for every engine

log = logging.getLogger(__name__)


def allocate(config: Config) -> Allocation:
    """Returns the pools of `allocation_mode`.

    With `rollout.addr` the sampler is the servers at those addresses, whatever the mode says. If
    the sampler uses no devices of this machine, the learner's devices start at the first.

    Raises UserError for a mode that can't be read or done.
    """
    allocation = parse(config.allocation_mode, find_plugin)
    if config.rollout.addr:
        allocation = dataclasses.replace(allocation, sampler=Pool(_attached_engine(allocation.sampler)))
    elif allocation.sampler is None or not find_plugin(allocation.sampler.engine).on_host(config):
        return allocation
    learner = allocation.learner and dataclasses.replace(allocation.learner, first_device=0)
    return dataclasses.replace(allocation, learner=learner)


def devices_of(allocation: Allocation) -> list[str]:
    """Returns the names of the devices that this process's engines see, once those are made."""
    engines = dict.fromkeys(pool.engine for pool in (allocation.sampler, allocation.learner) if pool is not None)
    return list(next(filter(None, (find_plugin(engine).devices() for engine in engines)), []))


def _attached_engine(sampler: Pool | None) -> str:
    """Returns the engine whose sampler is made of servers that run already.

    It is the mode's own engine if that can attach, else the only installed one that can.
    """
    if sampler is not None and find_plugin(sampler.engine).attaches:
        return sampler.engine
    able = [name for name, plugin in _loaded_plugins() if plugin.attaches]
    if len(able) != 1:
        found = f"several engines attach to servers: {', '.join(able)}" if able else "no engine attaches to servers"
        raise UserError(f"rollout.addr: {found} (name the one in allocation_mode, as the sampler)")
    return able[0]


def check(config: Config, allocation: Allocation) -> None:
    """Asks each engine of the allocation whether it can do what the config wants.

    Raises UserError; starts nothing.
    """
    # In a fixed order, so that a config always gets the same message. The sampler last: it may have to ask another interpreter.
    for name in allocation.engines:
        find_plugin(name).check(config, allocation)


def check_devices(config: Config, allocation: Allocation) -> None:
    """Asks each engine of the allocation whether its devices are here. Raises UserError."""
    for name in allocation.engines:
        find_plugin(name).check_devices(config, allocation)


def prepare(allocation: Allocation) -> None:
    """Has the engines of the allocation prepare this process, before any thread starts in it."""
    for name in allocation.engines:
        find_plugin(name).prepare()


def require_both(allocation: Allocation) -> tuple[Pool, Pool]:
    """Returns the pools of sampler and learner. Raises UserError if either is missing."""
    if allocation.sampler is None or allocation.learner is None:
        learns = allocation.sampler is None
        alone, both = ("learns", f"SAMPLER:d1+{allocation}") if learns else ("samples", f"{allocation}+LEARNER:d1")
        raise UserError(
            f"allocation_mode: {allocation} only {alone}; training needs both, as in {both}"
            f" (with actor.loss=sft too: evaluation samples)"
        )
    return allocation.sampler, allocation.learner


def require_sampler(allocation: Allocation) -> Pool:
    """Returns the sampler's pool. Raises UserError if there is none."""
    if allocation.sampler is None:
        raise UserError(f"allocation_mode: {allocation} cannot sample")
    return allocation.sampler


def make_lone_sampler(config: Config, pool: Pool, model_dir: Path) -> Sampler:
    """Makes the pool's sampler for a command that has no learner: see `Plugin.make_lone_sampler`."""
    return find_plugin(pool.engine).make_lone_sampler(config, pool, model_dir)


def make_learner(config: Config, pool: Pool, model_dir: Path) -> Learner:
    """Makes the pool's learner, or this process's part of it. Blocks; may compile."""
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
      workdir: directory of the run, which no other run uses; weights for servers elsewhere are
        published through one below it.
      make_learner: replaced by that of a `Leader` for a learner that may live in several processes
        (rljax/multiprocess).

    Raises:
      UserError: the allocation lacks one of them, they have no transport in common, or there is no
        room for weights on their way.
    """
    samples, learns = require_both(allocation)
    transport = transport_of(config, allocation)
    needed = sum(file.stat().st_size for file in model_dir.glob("*.safetensors")) if transport == DIRECTORY else 0
    here = find_plugin(samples.engine).is_here(config)
    parent = publish_parent(config.rollout.publish_dir, workdir, here=here, needed=needed)
    with stage(f"loading the model for training, by {learns.engine}"):
        learner = make_learner(config, learns, model_dir)
    with stage(f"loading the model for sampling, by {samples.engine}, and compiling or starting its servers"):
        sampler = find_plugin(samples.engine).make_sampler(config, samples, model_dir)
    in_memory = None if transport == DIRECTORY else ExportToSampler(transport, samples)
    return Engine(sampler, learner, in_memory, private_directory(parent, "publish"))


def transport_of(config: Config, allocation: Allocation) -> str:
    """Returns the sampler's best transport that the learner has too.

    "memory" counts only within one engine: arrays have that engine's own layout.

    Raises UserError if there is none, or a sampler or a learner is missing.
    """
    if allocation.sampler is None or allocation.learner is None:
        raise UserError(f"allocation_mode: {allocation} publishes no weights (a sampler and a learner do)")
    sampler, learner = allocation.sampler.engine, allocation.learner.engine
    taken, given = (find_plugin(name).routes(config, allocation) for name in (sampler, learner))
    for transport in taken:
        if transport in given and (transport != MEMORY or sampler == learner):
            return transport
    raise UserError(
        f"allocation_mode: no transport for weights from {learner} ({', '.join(given)}) to {sampler} ({', '.join(taken)})"
    )


def room_for_prompt(config: Config, allocation: Allocation) -> tuple[int, str]:
    """Returns the longest prompt in tokens, and the setting that limits it, as text for an error.

    A sampler ends a completion where its context is full.
    """
    engine = allocation.sampler.engine if allocation.sampler else ""
    context = find_plugin(engine).context_length(config) if engine else None
    row, new = config.actor.mb_spec.max_tokens_per_row, config.gconfig.max_new_tokens
    if context is not None and context <= row:
        return context - 1, f"{engine}.context_length={context} holds no completion beside it"
    return row - new, f"actor.mb_spec.max_tokens_per_row={row} cannot hold it and gconfig.max_new_tokens={new}"


def room_for_example(config: Config) -> tuple[int, str]:
    """Returns the most tokens of a labeled example, and the setting that limits it, for an error."""
    row = config.actor.mb_spec.max_tokens_per_row
    return row, f"actor.mb_spec.max_tokens_per_row={row} cannot hold it"


def find_plugin(name: str) -> Plugin:
    """Returns the engine registered under a name.

    Raises UserError for an unknown name, one registered twice, or an entry point that can't be
    loaded or is no `Plugin`.
    """
    try:
        plugin = entry_points.load(name)
    except UserError as error:
        raise UserError(f"allocation_mode: {error}") from error
    if not isinstance(plugin, Plugin):
        raise UserError(f"allocation_mode: the engine {name!r} is a {type(plugin).__name__}, not an rljax.engine.Plugin")
    return plugin


def portable_plugin(form: str) -> Plugin | None:
    """Returns the installed engine that reads checkpoints of a format, or None."""
    return next((plugin for _, plugin in _loaded_plugins() if form in plugin.formats), None)


def _loaded_plugins() -> Iterator[tuple[str, Plugin]]:
    """Yields all installed engines by name, in order; logs and skips those that can't be loaded."""
    for name in entry_points.names():
        try:
            yield name, find_plugin(name)
        except UserError as error:
            log.warning("the engine %s is skipped: %s", name, error)
