"""Opens a recorded run for binaries that make its steps again: config, learner, processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rljax.errors import UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.config.schema import Config
    from rljax.engine import Learner
    from rljax.flight.recording import Recording
    from rljax.flight.replayer import Remade, Replayer
    from rljax.multiprocess import Leader

SCRATCH = "replay"  # folder of the run directory for a learner of several processes

T = TypeVar("T")
MakeReplayer = Callable[..., "Replayer"]
"""Called with `change`, a further change of each step's config, and `on_made`, as `Replayer` has them; both optional."""


def replay(workdir: Path, recording: Recording, step: int, work: Callable[[MakeReplayer], T]) -> T | None:
    """Calls `work` with a function that makes replayers of the run, and returns its result.

    The allocation is that of the step's config with --config.KEY=VALUE. In a follower of a learner
    of several processes it follows, and returns None.

    Raises:
      UserError: the step is not recorded, or its allocation can't learn.
    """
    from rljax import engine, multiprocess
    from rljax.config import allocation
    from rljax.flight.replayer import Replayer

    config = changed(recording.config(recording.header(step)))
    pools = allocation.parse(config.allocation_mode, engine.find_plugin)
    if pools.learner is None:
        raise UserError(f"allocation_mode: {pools} cannot learn")
    engine.check(config, dataclasses.replace(pools, sampler=None))
    process, processes = multiprocess.find_rank(config, pools.learner)
    if process.rank > 0:
        multiprocess.follow(process, workdir / SCRATCH)
        return None
    with multiprocess.Leader(process, processes, config, workdir / SCRATCH, fail=lambda why: None) as leader:

        def make_replayer(
            change: Callable[[Config], Config] = lambda config: config,
            on_made: Callable[[Remade], None] = lambda remade: None,
        ) -> Replayer:
            return Replayer(
                recording,
                lambda config: _make_learner(config, workdir, leader),
                lambda config: change(changed(config)),
                on_made,
            )

        return work(make_replayer)


def changed(config: Config) -> Config:
    """Applies --config.KEY=VALUE to the config of a recorded step."""
    from rljax.config import io as config_io

    return config_io.resolve(config_io.changed(config, main.overrides_from_flags()))


def _make_learner(config: Config, workdir: Path, leader: Leader) -> Learner:
    """Makes a learner with the weights that the run in `workdir` began with."""
    from rljax.config import allocation
    from rljax.engine import find_plugin
    from rljax.hf import teacher
    from rljax.hf.model_directory import prepare_model_directory

    pool = allocation.parse(config.allocation_mode, find_plugin).learner
    assert pool is not None, "replay has checked it"
    model_dir = prepare_model_directory(config.actor, workdir / "init", seed=config.seed)
    teacher.check(config.actor, model_dir)
    return leader.make_learner(config, pool, model_dir)
