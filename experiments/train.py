"""Trains; the same command with the same --workdir goes on where it was stopped.

    python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

--config.KEY=VALUE sets a key of the config, as in --config.actor.optimizer.lr=1e-5; docs/config.md
describes all keys. The run directory then holds config.json, metrics.jsonl, samples.jsonl,
status.json, checkpoints/ and export/.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import secrets
import sys
from typing import TYPE_CHECKING

from rljax.experiments import main, recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rljax.config.allocation import Allocation, Pool
    from rljax.config.schema import Config
    from rljax.data import PromptSource
    from rljax.data.held_out import HeldOut
    from rljax.engine import Engine, Learner
    from rljax.hf.tokenizer import HFTokenizer
    from rljax.loop import Labeled, Outcome
    from rljax.multiprocess import Leader
    from rljax.process.watchdog import Watchdog
    from rljax.rollout.evaluation import Evaluation
    from rljax.sinks import Sinks
    from rljax.sinks.run_directory import RunDirectory
    from rljax.workers.server import WorkerServer


def train() -> None:
    """Trains as the flags say."""
    from rljax.process.descendants import adopt_orphans

    adopt_orphans()  # of this binary alone: a caller of `run` may have children of its own
    run(main.config_from_flags(), main.workdir_from_flags)


def run(config: Config, find_workdir: Callable[[], Path]) -> Outcome | None:
    """Trains.

    Args:
      find_workdir: returns the run directory; called once the config is known to be one.

    Returns:
      How the run ended; None in a process that only followed rank 0.

    Raises:
      UserError, GuardrailError, TooManyFailures, RankFailed: the run can't start, or has failed.
    """
    # --------------------------------------------------------------------------------------------------------------------
    # Config: strict, resolved, and checked for contradictions before anything starts
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import engine
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io
    from rljax.run import requirements

    config_checks.check(config)
    config = config_io.resolve(config)

    # --------------------------------------------------------------------------------------------------------------------
    # Allocation: which engines sample and learn on which devices; each engine checks the config
    # --------------------------------------------------------------------------------------------------------------------
    pools = engine.allocate(config)
    engine.require_both(pools)
    engine.check(config, pools)
    for require in requirements.OF_CONFIG:
        require(config)

    # --------------------------------------------------------------------------------------------------------------------
    # Ranks: in a learner of several processes, all but rank 0 become followers here
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import multiprocess

    workdir = find_workdir()
    engine.prepare(pools)
    process, processes = multiprocess.find_rank(config, pools.learner)
    if process.rank > 0:
        multiprocess.follow(process, workdir)
        return None

    # --------------------------------------------------------------------------------------------------------------------
    # Run directory: locked, so that two runs never share it; status.json records how the run ended
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.checkpoints.recovery import require_checkpoints
    from rljax.config import digests
    from rljax.process.watchdog import Watchdog
    from rljax.sinks import context
    from rljax.sinks.run_directory import RunDirectory

    directory = RunDirectory(workdir)
    limit, report = config.recover.hang_timeout, directory.path / "hang.txt"
    with (
        recording.recorded(directory, config.stats_logger.max_log_mb),
        Watchdog(limit, report, directory.fail, status=directory.status, starting=True) as watchdog,
    ):
        directory.begin(config)
        require_checkpoints(directory.path, directory.finished_steps())
        sessions = context.read(directory.path)  # refuses a damaged one now, before minutes of work
        digests.warn_of_changes(digests.of_last_step(sessions, directory.finished_steps()), digests.digests_of(config))
        with multiprocess.Leader(process, processes, config, directory.path, directory.fail) as leader:
            return asyncio.run(leader.watched(_train(config, pools, directory, leader, watchdog)))


@dataclasses.dataclass(frozen=True)
class Opened:
    """Model and data of a run, checked."""

    config: Config  # with the number of steps that the run will have
    resolved: Config  # as config.json has it
    model_dir: Path
    tokenizer: HFTokenizer
    prompts: PromptSource
    labeled: Labeled | None  # the same with their answers, for supervised steps
    learned: PromptSource  # those of the two whose number of passes ends the run
    held_out: Sequence[HeldOut]


def _open(config: Config, pools: Allocation, run: RunDirectory) -> Opened:
    """Opens model directory and data, and checks them. Raises UserError."""
    # --------------------------------------------------------------------------------------------------------------------
    # Model directory and tokenizer
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.hf import agreement
    from rljax.hf.model_directory import prepare_model_directory
    from rljax.hf.tokenizer import load_tokenizer
    from rljax.run import requirements

    model_dir = prepare_model_directory(config.actor, run.init, seed=config.seed)
    for require in requirements.OF_MODEL:
        require(config, model_dir)
    tokenizer = load_tokenizer(model_dir, config.rollout)
    agreement.check(model_dir, tokenizer)

    # --------------------------------------------------------------------------------------------------------------------
    # Data: prompts to train on, the same with their answers for supervised steps, and prompts to evaluate on
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import engine
    from rljax.data import Labels, open_prompts
    from rljax.data.held_out import open_held_out
    from rljax.loop import Labeled
    from rljax.rollout.limits import require_step, total_steps
    from rljax.sanity.start import at_start
    from rljax.workflows import tools_of

    added = tools_of(config.rollout)
    prompts = open_prompts(config.train_dataset, key="train_dataset", seed=config.seed, tokenizer=tokenizer, added_tools=added)
    if config.actor.loss != "sft" and config.train_dataset.max_length is None:
        most, why = engine.room_for_prompt(config, pools)
        prompts.require_fit(tokenizer, most=most, why=why)
    labeled, learned = None, prompts
    if config.warmup.steps or config.actor.loss == "sft":
        most, why = engine.room_for_example(config)
        labels = Labels(config.warmup, tokenizer, most=most, why=why)
        examples = open_prompts(
            config.train_dataset,
            key="train_dataset",
            seed=config.seed + 1,
            tokenizer=tokenizer,
            labels=labels,
            added_tools=added,
            like=prompts,
        )
        labeled = Labeled(examples, labels)
        learned = examples if config.actor.loss == "sft" else prompts
    evaluates = config.evaluator.freq_steps or config.evaluator.freq_epochs
    held_out = open_held_out(config, tokenizer, added) if evaluates else []
    at_start(config, prompts, held_out, tokenizer, model_dir)
    require_step(config, len(learned))
    resolved = config  # as config.json has it
    config = dataclasses.replace(config, total_train_steps=total_steps(config, len(learned)) - _warmup(config))
    return Opened(config, resolved, model_dir, tokenizer, prompts, labeled, learned, held_out)


async def _train(config: Config, pools: Allocation, run: RunDirectory, leader: Leader, watchdog: Watchdog) -> Outcome:
    """Trains, on the event loop of the run."""
    from rljax.process.stages import stage

    watchdog.watch_tasks()
    with stage("reading the model's files and the data"):
        opened = _open(config, pools, run)
    config, model_dir, tokenizer = opened.config, opened.model_dir, opened.tokenizer
    prompts, held_out = opened.prompts, opened.held_out

    # --------------------------------------------------------------------------------------------------------------------
    # Rewards, in processes of their own, and the workflow that uses them
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.hf.spec import read_vocab_size
    from rljax.loop import Loop, Run
    from rljax.process import interpreter
    from rljax.rewards import RewardPool
    from rljax.rewards.check import Records
    from rljax.sanity.start import warn_of_golds
    from rljax.sanity.trial import checked, try_filter
    from rljax.workflows import check_prompts, find_filter, sampling_params, scores_by_rewards, workflow_of
    from rljax.workflows.evaluations import evaluations_of

    params = sampling_params(config.gconfig, tokenizer)
    accept = find_filter(config.rollout.should_accept_fn, mask_no_eos=config.actor.mask_no_eos)
    await try_filter(config.rollout.should_accept_fn, accept, config.gconfig.n_samples)
    async with RewardPool(config.reward) as rewards, contextlib.AsyncExitStack() as trials:
        workflow = workflow_of(config, tokenizer, rewards)
        if config.actor.loss != "sft":
            check_prompts(workflow, prompts.every(), prompts.where)
        for each in held_out:
            check_prompts(workflow, each.prompts, each.where)
        if scores_by_rewards(workflow):
            if config.actor.loss != "sft":
                warn_of_golds(config, prompts, tokenizer)
            training = [] if config.actor.loss == "sft" else [Records.of_stream(prompts)]
            with stage("trying the reward on some records"):
                for records in [*training, *map(Records.of_set, held_out)]:
                    await trials.enter_async_context(checked(rewards, config.reward.name, records, tokenizer))
        evaluations = evaluations_of(config, held_out, workflow, tokenizer)

        # ----------------------------------------------------------------------------------------------------------------
        # Engine, and the loop over it
        # ----------------------------------------------------------------------------------------------------------------
        _announce(opened, run, evaluations)
        engine = _build_engine(opened, pools, run, leader)
        interpreter.settle()
        return await Loop(
            Run(
                config=config,
                engine=engine,
                prompts=prompts,
                workflow=workflow,
                params=params,
                open_sinks=functools.partial(_open_sinks, opened, pools, run, evaluations),
                workdir=run.path,
                accept=accept,
                vocab_size=read_vocab_size(model_dir),
                labeled=opened.labeled,
                evaluations=evaluations,
                worker_server=_worker_server(config, model_dir, run) if config.actor.loss != "sft" else None,
                before=run.read_status(),
                take_metrics=rewards.take_metrics,
                watchdog=watchdog,
            )
        ).run()


def _announce(opened: Opened, run: RunDirectory, evaluations: Sequence[Evaluation]) -> None:
    """Says what is about to be trained, before anything is compiled."""
    from rljax.checkpoints.store import Checkpoints
    from rljax.run import announcement

    checkpoints = Checkpoints(run.path / "checkpoints", opened.config.saver.keep_last)
    announcement.say_what(
        opened.config,
        run.path,
        opened.model_dir,
        saved=max(checkpoints.steps(), default=None),
        prompts=len(opened.learned),
        skipped=opened.learned.skipped,
        held_out=sum(len(each.prompts) for each in evaluations),
        asked=opened.resolved.total_train_steps,
    )


def _build_engine(opened: Opened, pools: Allocation, run: RunDirectory, leader: Leader) -> Engine:
    """Makes sampler and learner, perhaps with a shadow of the learner."""
    from rljax import engine
    from rljax.shadow import shadowed

    def make_learner(config: Config, pool: Pool, model_dir: Path) -> Learner:
        return shadowed(config, leader.make_learner(config, pool, model_dir), pool, model_dir, run.path)

    return engine.build(opened.config, pools, opened.model_dir, run.path, make_learner)


def _open_sinks(
    opened: Opened, pools: Allocation, run: RunDirectory, evaluations: Sequence[Evaluation], first_step: int
) -> Sinks:
    """Records what the run is made of, and opens the sinks of its metrics."""
    from rljax import engine
    from rljax.planning.run import estimate_of
    from rljax.run import announcement
    from rljax.sinks import context
    from rljax.sinks.build import build as build_sinks

    resolved, model_dir, devices = opened.resolved, opened.model_dir, engine.devices_of(pools)
    protocols = {each.name: each.protocol for each in evaluations if each.protocol is not None}
    this = context.session(
        resolved,
        first_step=first_step,
        model_dir=model_dir,
        data=opened.prompts.identity,
        protocols=protocols,
        devices=devices,
    )
    context.append(run, this)
    announcement.say_where(opened.config, devices)
    estimate = estimate_of(resolved, model_dir, devices, pools.devices, engine.find_plugin)
    return build_sinks(opened.config, run, opened.tokenizer, first_step=first_step, estimate=estimate)


def _worker_server(config: Config, model_dir: Path, run: RunDirectory) -> WorkerServer | None:
    """Makes the server for workers, the run's own and those from elsewhere; None if it needs none."""
    if not config.rollout.workers and not config.rollout.listen:
        return None
    from rljax.engine import memory_backed, private_directory
    from rljax.workers.launcher import WorkerProcesses
    from rljax.workers.server import WorkerServer

    command = [sys.executable, "-m", "rljax.experiments.rollout"]
    return WorkerServer(
        config,
        model_dir,
        token=os.environ.get("RLJAX_TOKEN") or secrets.token_urlsafe(),
        scratch=private_directory(memory_backed(), "server"),
        address_file=run.path / "workers.json",
        children=WorkerProcesses(command, config.rollout.workers, run.path / "workers") if config.rollout.workers else None,
    )


def _warmup(config: Config) -> int:
    """Returns the number of supervised steps before reinforcement."""
    return 0 if config.actor.loss == "sft" else config.warmup.steps


if __name__ == "__main__":
    main.define_config_flags()
    main.run_main(train)
