"""GSPO (Zheng et al. 2025, arXiv:2507.18071) on the quickstart's task.

python -m experiments.train --config=configs/algorithms/gspo.py --workdir=runs/gspo

The importance ratio is of the sequence, normalized by its length, and clipped there. The published
clip range, 3e-4 and 4e-4, is for models whose steps are far smaller.
"""

from ml_collections import ConfigDict

from rljax.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.actor.importance_sampling_level = "sequence"
    config.actor.loss_aggregation = "seq-mean-token-mean"
    config.actor.eps_clip = 0.1
    config.actor.eps_clip_higher = 0.13
    return config
