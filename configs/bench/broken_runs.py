"""Reinforcement alone on the quickstart's task: what each of the broken runs is made from.

    python -m experiments.bench.broken_runs --run=grpo --seed=1 --workdir=runs/grpo

It starts from a model that the quickstart's warm-up has made (`actor.path`), so that a run is 70
steps of reinforcement: about 30 seconds on 2 cores.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.total_train_steps = 70
    config.actor.init_from_scratch = False
    config.warmup.steps = 0
    config.train_dataset.task.misled = 0.0  # the demonstrations were for the warm-up

    config.actor.optimizer.lr = 1e-4
    config.actor.optimizer.lr_scheduler_type = "constant"  # the same whatever the number of steps
    config.actor.optimizer.warmup_steps_proportion = 0.0

    config.evaluator.freq_steps = 10
    config.saver.freq_steps = None
    config.saver.export_final = False
    config.stats_logger.samples_per_step = 8
    return config
