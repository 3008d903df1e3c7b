"""Makes a step of a run again, or trains on batches that experiments.rollout wrote.

    python -m experiments.replay --workdir=runs/quickstart --step=913
    python -m experiments.replay --config=configs/quickstart.py --batch=DIR --workdir=runs/replay

Nothing is sampled. With --step it restores the newest checkpoint before that step, trains on the
batches that the run recorded since (WORKDIR/flight), and prints the metrics of each step beside
those of the run. Exit status 0 if all agree, 2 if one differs. --config.allocation_mode=fsdp:d1
makes the steps on another engine; other keys can be changed too. --debug stops in the debugger
before the step (docs/debugging.md). The run directory is only read.

With --batch=DIR,DIR it takes the dumps of several shards as one batch. Each of total_train_steps
steps (one, unless it is set) is the training step of experiments.train on the next of the batches,
in turn: advantages, packing, scoring, minibatches. It repeats the arithmetic on the same data any
number of times, on either path.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main, recording

if TYPE_CHECKING:
    from rljax.config.schema import Config
    from rljax.engine import Learner
    from rljax.sinks.run_directory import RunDirectory
    from rljax.types import Group

main.define_config_flags(what="With --step: directory of the run. With --batch: a new directory.")
BATCH = flags.DEFINE_multi_string(
    "batch",
    [],
    "A directory that experiments.rollout wrote, or those of its shards with commas between; may be given several times.",
)
STEP = flags.DEFINE_integer("step", None, "The step of the run in --workdir to make again.", lower_bound=1)
DEBUG = flags.DEFINE_bool("debug", False, "With --step: stop in the debugger before the step.")


def replay() -> None:
    """Makes a step again, or trains on batches, as the flags say."""
    if STEP.value is not None:
        if BATCH.value:
            raise UserError("--batch: excludes --step (whose batches are those that the run recorded)")
        if main.FLAGS.config is not None and main.FLAGS.workdir:
            raise UserError("--config: has no meaning with --step (the run has its own; --config.KEY=VALUE changes a key)")
        from rljax.experiments import replay_step

        return replay_step.remake(main.workdir_from_flags("the directory of a run"), STEP.value, debug=DEBUG.value)
    if not BATCH.value:
        raise UserError("--batch: missing (a directory that `rljax rollout` wrote; or --step, a step of the run in --workdir)")
    if DEBUG.value:
        raise UserError("--debug: has no meaning without --step")
    train_on_batches(main.config_from_flags())


def train_on_batches(config: Config) -> None:
    """Trains on the batches of --batch, in as many processes as the learner needs."""
    # --------------------------------------------------------------------------------------------------------------------
    # Config and allocation: of the learner alone
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import engine
    from rljax.config import allocation
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io

    config_checks.check(config)
    warmup = dataclasses.replace(config.warmup, steps=0)
    config = dataclasses.replace(config_io.resolve(config), warmup=warmup, total_train_steps=config.total_train_steps or 1)
    pools = allocation.parse(config.allocation_mode, engine.find_plugin)
    if (pool := pools.learner) is None:
        raise UserError(f"allocation_mode: {pools} cannot learn")
    pools = dataclasses.replace(pools, sampler=None)
    engine.check(config, pools)

    # --------------------------------------------------------------------------------------------------------------------
    # Ranks: in a learner of several processes, all but rank 0 become followers here
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import multiprocess

    workdir = main.workdir_from_flags()
    engine.prepare(pools)
    process, processes = multiprocess.find_rank(config, pool)
    if process.rank > 0:
        return multiprocess.follow(process, workdir)

    # --------------------------------------------------------------------------------------------------------------------
    # Run directory
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.sinks.run_directory import RunDirectory

    batches = _load_batches()
    run = RunDirectory(workdir)
    with (
        recording.recorded(run, config.stats_logger.max_log_mb),
        multiprocess.Leader(process, processes, config, run.path, run.fail) as leader,
    ):
        if run.holds_a_run:
            raise UserError(f"--workdir: {run.path} holds a run; a replay starts in a directory of its own")
        run.begin(config)
        _learn(config, batches, run, functools.partial(leader.make_learner, config, pool))


def _load_batches() -> list[list[Group]]:
    """Loads the dumps of --batch. Raises UserError for one without trajectories."""
    from rljax.rollout import dump

    batches = [dump.load_shards([Path(directory) for directory in batch.split(",")]) for batch in BATCH.value]
    for batch, groups in zip(BATCH.value, batches, strict=True):
        if not any(group.trajectories for group in groups):
            raise UserError(f"--batch: {batch} holds no trajectories: there is nothing to train on")
    return batches


def _learn(config: Config, batches: Sequence[list[Group]], run: RunDirectory, make_learner: Callable[[Path], Learner]) -> None:
    """Takes the steps, on the batches in turn, and writes what a run writes of them."""
    from rljax.engine import ExportToDirectory
    from rljax.hf import teacher
    from rljax.hf.model_directory import prepare_model_directory
    from rljax.hf.spec import read_vocab_size
    from rljax.hf.tokenizer import load_tokenizer
    from rljax.metrics.accumulator import PhaseTimer
    from rljax.sinks import RunState, Status
    from rljax.sinks.build import build as build_sinks
    from rljax.train_step import learn

    model_dir = prepare_model_directory(config.actor, run.init, seed=config.seed)
    teacher.check(config.actor, model_dir)
    tokenizer = load_tokenizer(model_dir)
    _check_ids(batches, read_vocab_size(model_dir))
    learner = make_learner(model_dir)
    sinks = build_sinks(config, run, tokenizer, first_step=0)
    total = config.total_train_steps
    timer = PhaseTimer(lambda _: None)
    for step, groups in enumerate(itertools.islice(itertools.cycle(batches), total)):
        learned = learn(learner, config, groups, step, timer)
        sinks.write(step + 1, learned.metrics | timer.drain())
        sinks.histograms(step + 1, learned.histograms)
        sinks.status(Status(RunState.RUNNING, step=step + 1, version=step + 1, total_steps=total))
    if config.saver.export_final:
        learner.export(ExportToDirectory(run.export))
    sinks.status(Status(RunState.FINISHED, step=total or 0, version=total or 0, total_steps=total))
    sinks.close()
    learner.close()


def _check_ids(batches: Sequence[Sequence[Group]], vocab_size: int | None) -> None:
    """Raises UserError for a batch that was dumped with another vocabulary."""
    from rljax.rollout.trajectories import check_token_ids

    for directory, groups in zip(BATCH.value, batches, strict=True):
        try:
            check_token_ids((trajectory for group in groups for trajectory in group.trajectories), vocab_size)
        except ValueError as error:
            raise UserError(f"--batch: {directory}: {error} (another model made it)") from None


if __name__ == "__main__":
    main.run_main(replay)
