"""PPO with a critic (Schulman et al. 2017, arXiv:1707.06347) on the quickstart's task.

    python -m experiments.train --config=configs/algorithms/ppo.py --workdir=runs/ppo

Generalized advantage estimation over the critic's values, one sample per prompt, advantages
normalized over the batch.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.adv_estimator = "gae"
    config.actor.gae_lambda = 0.95
    config.actor.reward_norm.mean_level = "none"
    config.actor.reward_norm.std_level = "none"
    config.actor.adv_norm.mean_level = "batch"
    config.actor.adv_norm.std_level = "batch"
    config.critic.optimizer.lr = 1e-3
    config.critic.eps_clip_value = 0.2
    config.critic.ppo_n_minibatches = 2
    config.gconfig.n_samples = 1
    config.train_dataset.batch_size = 256
    return config
