"""The arithmetic of an update in float64 numpy: the definition that every backend must equal.

spec.py                 what a policy update minimizes, as one hashable value
losses.py               the terms, with gradients by hand
logprobs.py             log-probs and entropy from hidden states, with the gradient by hand
oracle.py               the terms put together
advantages.py           advantages of whole groups
reward_shaping.py       changes to a reward before advantages are computed
aggregation.py          weights that add token losses up
proximal.py             proximal log-probs without a forward pass
explained_variance.py   a critic's explained variance, from its metrics
"""
