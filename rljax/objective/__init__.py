"""The arithmetic of an update, in float64 numpy: the definition that every backend is held to.

spec.py             what a policy update minimizes, as one hashable value
losses.py           the terms, with gradients by hand
logprobs.py         log-probs and entropy from hidden states, with the gradient by hand
oracle.py           the terms put together
advantages.py       advantages of whole groups
reward_shaping.py   what is done to a reward before advantages see it
aggregation.py      how token losses add up
proximal.py         proximal log-probs without a forward pass
"""
