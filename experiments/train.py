"""Trains, asynchronously or not; the same command with the same --workdir goes on where it was stopped.

python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

--config.KEY=VALUE sets a key of the config, as in --config.actor.optimizer.lr=1e-5; rljax/config.py says what each means.
The run directory then holds config.json, metrics.jsonl, samples.jsonl, status.json, checkpoints/ and export/.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import secrets
import sys
from typing import TYPE_CHECKING

from experiments import main

if TYPE_CHECKING:
    from pathlib import Path

    from rljax.allocation import Allocation
    from rljax.config import Config
    from rljax.feed import Feed
    from rljax.loop import Outcome
    from rljax.ranks import Team
    from rljax.sinks.run_directory import RunDirectory

main.define_config_flags()


def train() -> None:
    # --------------------------------------------------------------------------------------------------------------------
    # Config: strict, resolved, and checked for contradictions before anything starts
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import config_checks, config_io, engine

    config = main.config_from_flags()
    config_checks.check(config)
    config = config_io.resolve(config)

    # --------------------------------------------------------------------------------------------------------------------
    # Allocation: what samples and what learns where; each engine is asked whether it can
    # --------------------------------------------------------------------------------------------------------------------
    pools = engine.allocate(config)
    engine.require_both(pools)
    engine.check(config, pools)

    # --------------------------------------------------------------------------------------------------------------------
    # Ranks: where the learner lives in several processes, the others follow the one that goes on here
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import ranks

    workdir = main.workdir_from_flags()
    place, processes = ranks.find_place(config, pools.learner)
    if place.rank > 0:
        return ranks.follow(place, workdir)

    # --------------------------------------------------------------------------------------------------------------------
    # Run directory: locked, so that two runs never share it; it tells how the run ended
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.sinks.run_directory import RunDirectory

    run = RunDirectory(workdir)
    with main.recorded(run):
        run.begin(config)
        with ranks.Team(place, processes, config, run.path, run.fail) as team:
            asyncio.run(team.watched(_train(config, pools, run, team)))


async def _train(config: Config, pools: Allocation, run: RunDirectory, team: Team) -> Outcome:
    # --------------------------------------------------------------------------------------------------------------------
    # Model directory and tokenizer
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import config_checks, model_directory, tokenizer

    model_dir = model_directory.prepare(config.actor, run.init, seed=config.seed)
    words = tokenizer.load(model_dir)

    # --------------------------------------------------------------------------------------------------------------------
    # Data: prompts to train on, the same with their answers for supervised steps, and prompts to evaluate on
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.data import labelled_trajectory, open_prompts
    from rljax.evaluation import Evaluation
    from rljax.extent import total_steps
    from rljax.loop import Labelled, Loop, Run

    prompts = open_prompts(config.train_dataset, key="train_dataset", seed=config.seed, tokenizer=words)
    if config.actor.loss != "sft" and config.train_dataset.max_length is None:
        most, why = config_checks.room_for_prompt(config, pools)
        prompts.require_fit(words, most=most, why=why)
    labelled, held_out = None, None
    if config.warmup.steps or config.actor.loss == "sft":
        examples = open_prompts(config.train_dataset, key="train_dataset", seed=config.seed + 1, tokenizer=words)
        examples.require(config.warmup.field, "warmup.field")
        labelled = Labelled(examples, lambda prompt: labelled_trajectory(prompt, words, config.warmup.field))
    if config.evaluator.freq_steps or config.evaluator.freq_epochs:
        source = open_prompts(config.valid_dataset, key="valid_dataset", seed=config.seed, tokenizer=words)
        held_out = list(itertools.islice(source.epoch(0), config.evaluator.max_prompts))
    config = dataclasses.replace(config, total_train_steps=total_steps(config, len(prompts)) - _warmup(config))

    # --------------------------------------------------------------------------------------------------------------------
    # Rewards, in processes of their own, and the workflow that asks for them
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.rewards import RewardPool
    from rljax.sinks.build import build as build_sinks
    from rljax.workflows import build_workflow, find_filter, sampling_params

    params = sampling_params(config.gconfig, words)
    accept = find_filter(config.rollout.should_accept_fn)
    async with RewardPool(config.reward) as rewards:
        workflow = build_workflow(
            config.rollout.workflow, tokenizer=words, rewards=rewards, arguments=config.rollout.workflow_args
        )
        evaluation = None
        if held_out is not None:
            judge = config.evaluator
            judged = dataclasses.replace(
                params, greedy=judge.greedy, temperature=judge.temperature, top_p=judge.top_p, top_k=judge.top_k
            )
            evaluation = Evaluation(held_out, workflow, judged, judge.n_samples)

        # ----------------------------------------------------------------------------------------------------------------
        # Engine, and the loop over it
        # ----------------------------------------------------------------------------------------------------------------
        from rljax import engine

        return await Loop(
            Run(
                config=config,
                engine=engine.build(config, pools, model_dir, run.path, team.make_learner),
                prompts=prompts,
                workflow=workflow,
                params=params,
                open_sinks=lambda first_step: build_sinks(config, run, words, first_step=first_step),
                workdir=run.path,
                accept=accept,
                labelled=labelled,
                evaluation=evaluation,
                feed=_feed(config, model_dir, run) if config.actor.loss != "sft" else None,
                measured=rewards.take_metrics,
            )
        ).run()


def _feed(config: Config, model_dir: Path, run: RunDirectory) -> Feed | None:
    """Where workers attach: those that the run starts, and those from elsewhere."""
    if not config.rollout.workers and not config.rollout.listen:
        return None
    from rljax.children import Children
    from rljax.engine import scratch
    from rljax.feed import Feed

    command = [sys.executable, "-m", "experiments.rollout"]
    return Feed(
        config,
        model_dir,
        token=os.environ.get("RLJAX_TOKEN") or secrets.token_urlsafe(),
        scratch=scratch(run.path, "-feed"),
        door=run.path / "workers.json",
        children=Children(command, config.rollout.workers, run.path / "workers") if config.rollout.workers else None,
    )


def _warmup(config: Config) -> int:
    """Supervised steps before reinforcement."""
    return 0 if config.actor.loss == "sft" else config.warmup.steps


if __name__ == "__main__":
    main.run_main(train)
