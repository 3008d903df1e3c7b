"""DAPO (Yu et al. 2025, arXiv:2503.14476) on the quickstart's task.

    python -m experiments.train --config=configs/algorithms/dapo.py --workdir=runs/dapo

Clip-higher, token-level loss, prompts whose samples all score alike replaced by others, and a soft
penalty on completions close to max_new_tokens.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.eps_clip = 0.2
    config.actor.eps_clip_higher = 0.28
    config.actor.loss_aggregation = "token-mean"
    config.rollout.should_accept_fn = "mixed_rewards"
    config.actor.overlong_reward_penalty = True
    config.actor.overlong_tokens = 1
    config.actor.overlong_penalty_factor = 1.0
    return config
