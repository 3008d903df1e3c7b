"""CISPO (MiniMax 2025, arXiv:2506.13585) on the quickstart's task.

python -m experiments.train --config=configs/algorithms/cispo.py --workdir=runs/cispo

The importance weight is clipped and detached, so that no token loses its gradient; there is no
lower bound.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.loss = "cispo"
    config.actor.eps_clip = 1.0
    config.actor.eps_clip_higher = 0.28
    config.actor.loss_aggregation = "token-mean"
    return config
