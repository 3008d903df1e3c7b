"""An engine whose policy is one table: the logits of the next token, given the last.

The whole loop runs on it in milliseconds, for tests.

model.py       the table and its directory
sampler.py     draws from it, with faults and delays on request
learner.py     learns it by the oracle's exact gradient, in one process or more
collective.py  sums between those processes
plugin.py      the entry point `fake`
"""
