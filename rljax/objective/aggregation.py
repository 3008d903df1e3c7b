"""Aggregation of token losses to the loss of a minibatch: a weight per token.

The weight has the global normalizer in it. It is computed once over all trajectories of a minibatch
(one optimizer step), before they are cut into rows, micro-batches or ranks; after that a loss is a
plain sum, and cutting it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def loss_weights(masks: Sequence[np.ndarray], aggregation: str, constant: int | None = None) -> list[np.ndarray]:
    """Returns weights w such that the minibatch's loss is sum(w * token_loss).

    With n_i trained tokens in trajectory i, N of them in all and S trajectories with at least one:

    - token-mean: 1 / N (DAPO, arXiv:2503.14476, eq. 8)
    - seq-mean-token-mean: 1 / (S n_i) (GRPO, arXiv:2402.03300, eq. 3)
    - seq-mean-token-sum: 1 / (S constant) (Dr. GRPO, arXiv:2503.20783: no bias to length)

    Args:
      masks: [T_i] bool, the trained tokens of every trajectory of the minibatch, all ranks
        together.
      constant: tokens; only for seq-mean-token-sum (usually max_new_tokens).

    Returns:
      [T_i] float32, 0 where a mask is False; all zeros when nothing is trained, never a division
      by 0.
    """
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    sequences = max(sum(count > 0 for count in counts), 1)
    if aggregation == "token-mean":
        scales = [1.0 / max(sum(counts), 1)] * len(counts)
    elif aggregation == "seq-mean-token-mean":
        scales = [1.0 / (sequences * max(count, 1)) for count in counts]
    elif aggregation == "seq-mean-token-sum" and constant:
        scales = [1.0 / (sequences * constant)] * len(counts)
    else:
        raise ValueError(f"no aggregation {aggregation!r} with the constant {constant}")
    return [np.where(mask, np.float32(scale), np.float32(0)) for mask, scale in zip(masks, scales, strict=True)]
