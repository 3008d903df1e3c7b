"""Metrics: sums and counts that merge, what is counted between two steps, and bounds that end a
run.

mean.py          (sum, count), merged over micro-batches, ranks and steps
accumulator.py   counters, observations and timers between two steps
guardrails.py    bounds on a step's metrics
"""
