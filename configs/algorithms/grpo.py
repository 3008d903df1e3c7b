"""GRPO (Shao et al. 2024, arXiv:2402.03300) on the quickstart's task.

python -m experiments.train --config=configs/algorithms/grpo.py --workdir=runs/grpo

Rewards are centered and scaled within a prompt's samples, sequences count alike whatever their
length, and a KL to the initial model is part of the loss.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.adv_estimator = "grpo"
    config.actor.reward_norm.mean_level = "group"
    config.actor.reward_norm.std_level = "group"
    config.actor.loss_aggregation = "seq-mean-token-mean"
    config.actor.kl_ctl = 0.001
    config.actor.kl_estimator = "k3"
    config.actor.kl_placement = "loss"
    return config
