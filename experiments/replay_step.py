"""A recorded step made again, from the checkpoint before it: experiments.replay with --step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rljax.errors import UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.config.schema import Config
    from rljax.engine import Learner
    from rljax.multiprocess import Leader

DIFFERS = 2  # exit status
SCRATCH = "replay"  # folder of the run directory for a learner of several processes


def remake(workdir: Path, step: int, *, debug: bool) -> None:
    """Makes a step again and prints its metrics beside the recorded ones.

    Exits with status 2 if they differ.

    Args:
      debug: stop in the debugger before the step.
    """
    # --------------------------------------------------------------------------------------------------------------------
    # What was recorded, and where it is made again
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import multiprocess
    from rljax.config import allocation
    from rljax.engine import find_plugin
    from rljax.flight.comparison import Comparison, compare
    from rljax.flight.recording import Recording
    from rljax.flight.replayer import Remade, Replayer

    recording = Recording(workdir)
    record = recording.read(step)
    config = changed(record.config)
    pool = allocation.parse(config.allocation_mode, find_plugin).learner
    if pool is None:
        raise UserError(f"allocation_mode: {config.allocation_mode} cannot learn")
    process, processes = multiprocess.find_rank(config, pool)
    if process.rank > 0:
        return multiprocess.follow(process, workdir / SCRATCH)

    # --------------------------------------------------------------------------------------------------------------------
    # The steps from the checkpoint on, and the step itself
    # --------------------------------------------------------------------------------------------------------------------
    def compared(remade: Remade) -> Comparison:
        return compare(recording.metrics(remade.step), remade.metrics, dtype=config.actor.dtype, steps=replayer.distance)

    def report(remade: Remade) -> None:
        print(f"step {remade.step}: {compared(remade).verdict}", flush=True)

    with multiprocess.Leader(process, processes, config, workdir / SCRATCH, fail=lambda why: None) as leader:
        replayer = Replayer(recording, lambda of: make_learner(of, workdir, leader), changed, report)
        replayer.go_to(record.header.parent, record.config)
        if debug:
            learner, groups, scores = replayer.learner, record.groups, record.scores
            print(f"`replayer.make(record)` makes step {step}; learner, config, groups and scores are here", flush=True)
            breakpoint()
            del learner, groups, scores
        comparison = compared(replayer.make(record))
        replayer.close()
    print(f"\n{comparison.table()}\n\nstep {step}: {comparison.verdict}")
    if not comparison.holds:
        sys.exit(DIFFERS)


def changed(config: Config) -> Config:
    """Applies --config.KEY=VALUE to the config of a recorded step."""
    from rljax.config import io as config_io

    return config_io.resolve(config_io.changed(config, main.overrides_from_flags()))


def make_learner(config: Config, workdir: Path, leader: Leader) -> Learner:
    """Makes a learner with the weights that the run in `workdir` began with."""
    from rljax.config import allocation
    from rljax.engine import find_plugin
    from rljax.hf import teacher
    from rljax.hf.model_directory import prepare_model_directory

    pool = allocation.parse(config.allocation_mode, find_plugin).learner
    assert pool is not None
    model_dir = prepare_model_directory(config.actor, workdir / "init", seed=config.seed)
    teacher.check(config.actor, model_dir)
    return leader.make_learner(config, pool, model_dir)
