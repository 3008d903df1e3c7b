"""Proximal log-probs without a forward pass, interpolated by version.

The proximal policy lies between the behavior policy and the current one.
"""

from __future__ import annotations

import numpy as np


def interpolation(versions: np.ndarray, version: int, minibatch: int, n_minibatches: int) -> np.ndarray:
    """Returns the coefficient a of the log-linear proximal policy.

    log pi_prox = log pi_behave + a (log pi_theta - log pi_behave)

    A token of version v was sampled v updates in. The update under way starts at `version`, and in
    its minibatch k of n it has come to version + k / n. The proximal policy is the one at
    `version`, so a = (version - v) / (version + k / n - v): exactly 1 in the first minibatch
    (proximal is current), and 0 for a token of no lag (proximal is behavior). AReaL's
    `prox_logp_method="loglinear"` (docs/algorithms/prox_approx.md there) is the same approximation,
    but puts the proximal policy one version before the current one in every minibatch.

    Args:
      versions: [...] int, per token; PROMPT_VERSION where none was sampled (the result there is not
        used).
      version: the learner's at the start of the update, at least that of every token.
      minibatch: k, counted from 0.
      n_minibatches: n.

    Returns:
      [...] float32 in [0, 1].
    """
    progress = minibatch / n_minibatches
    lag = np.maximum(version - versions, 0).astype(np.float64)
    span = lag + progress
    return np.divide(lag, span, out=np.ones_like(span), where=span > 0).astype(np.float32)
