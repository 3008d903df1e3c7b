"""Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) on the quickstart's task.

python -m experiments.train --config=configs/algorithms/dr_grpo.py --workdir=runs/dr_grpo

GRPO without its two biases: rewards are centered within a prompt's samples and not scaled, and
token losses are summed over a constant, so that neither hard prompts nor short answers weigh more.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.adv_estimator = "grpo"
    config.actor.reward_norm.mean_level = "group"
    config.actor.reward_norm.std_level = "none"
    config.actor.loss_aggregation = "seq-mean-token-sum"
    config.actor.loss_aggregation_constant = config.gconfig.max_new_tokens
    return config
