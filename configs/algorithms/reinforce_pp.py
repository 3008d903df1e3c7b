"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262) on the quickstart's task.

python -m experiments.train --config=configs/algorithms/reinforce_pp.py --workdir=runs/reinforce_pp

No critic and no groups: the return of each token, with a KL penalty in the reward, normalized over
the batch.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.adv_estimator = "reinforce_pp"
    config.actor.reward_norm.mean_level = "none"
    config.actor.reward_norm.std_level = "none"
    config.actor.adv_norm.mean_level = "batch"
    config.actor.adv_norm.std_level = "batch"
    config.actor.kl_ctl = 0.001
    config.actor.kl_estimator = "k1"
    config.actor.kl_placement = "reward"
    config.gconfig.n_samples = 1
    config.train_dataset.batch_size = 256
    return config
