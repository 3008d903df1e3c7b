"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740) on the quickstart's task.

python -m experiments.train --config=configs/algorithms/rloo.py --workdir=runs/rloo

REINFORCE with the mean reward of a prompt's other samples as the baseline.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.adv_estimator = "rloo"
    config.actor.reward_norm.mean_level = "none"
    config.actor.reward_norm.std_level = "none"
    return config
