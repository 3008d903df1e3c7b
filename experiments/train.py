"""Trains, asynchronously or not; the same command with the same --workdir goes on where it was stopped.

python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart

--config.KEY=VALUE sets a key of the config, as in --config.actor.optimizer.lr=1e-5; rljax/config.py says what each means.
The run directory then holds config.json, metrics.jsonl, samples.jsonl, status.json, checkpoints/ and export/.
"""

from __future__ import annotations

from experiments import main

main.define_config_flags()


def train() -> None:
    # --------------------------------------------------------------------------------------------------------------------
    # Config: strict, resolved, and checked for contradictions before anything starts
    # --------------------------------------------------------------------------------------------------------------------
    from rljax import allocation, config_checks, config_io, engine

    config = main.config_from_flags()
    config_checks.check(config)
    config = config_io.resolve(config)

    # --------------------------------------------------------------------------------------------------------------------
    # Allocation: what samples and what learns where; each engine is asked whether it can
    # --------------------------------------------------------------------------------------------------------------------
    pools = allocation.parse(config.allocation_mode, engine.find_plugin)
    engine.check(config, pools)

    # --------------------------------------------------------------------------------------------------------------------
    # Run directory: locked, so that two runs never share it
    # --------------------------------------------------------------------------------------------------------------------
    from rljax.sinks.run_directory import RunDirectory

    run = RunDirectory(main.workdir_from_flags())
    with main.recorded(run):
        run.begin(config)

        # ----------------------------------------------------------------------------------------------------------------
        # Model directory and tokenizer
        # ----------------------------------------------------------------------------------------------------------------
        from rljax import model_directory, tokenizer

        model_dir = model_directory.prepare(config.actor, run.init, seed=config.seed)
        words = tokenizer.load(model_dir)

        # ----------------------------------------------------------------------------------------------------------------
        # Data
        # ----------------------------------------------------------------------------------------------------------------
        from rljax.data import open_prompts

        prompts = open_prompts(config.train_dataset, key="train_dataset", seed=config.seed, tokenizer=words)
        evaluates = config.evaluator.freq_steps or config.evaluator.freq_epochs
        held_out = (
            open_prompts(config.valid_dataset, key="valid_dataset", seed=config.seed, tokenizer=words) if evaluates else None
        )

        # ----------------------------------------------------------------------------------------------------------------
        # Workflow and rewards
        # ----------------------------------------------------------------------------------------------------------------
        from rljax.rewards import RewardPool
        from rljax.workflows import build_workflow

        rewards = RewardPool(config.reward)
        workflow = build_workflow(
            config.rollout.workflow, tokenizer=words, rewards=rewards, arguments=config.rollout.workflow_args
        )

        # ----------------------------------------------------------------------------------------------------------------
        # Engine, and the loop over it
        # ----------------------------------------------------------------------------------------------------------------
        from rljax import loop

        both = engine.build(config, pools, model_dir, run.path)


if __name__ == "__main__":
    main.run_main(train)
