"""Supervised training on the quickstart's answers: the same learner, without samples.

    python -m experiments.train --config=configs/algorithms/sft.py --workdir=runs/sft

The negative log-likelihood of answers falls; eval-rollout/reward is still measured on samples of
the trained policy.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.loss = "sft"
    config.warmup.field = "answer"
    config.total_train_steps = 900
    config.train_dataset.batch_size = 64  # examples
    config.actor.optimizer.lr = 2e-3
    config.evaluator.freq_steps = 100
    return config
