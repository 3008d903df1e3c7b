"""Metrics of a run.

mean.py          sums and counts, merged over micro-batches, ranks and steps
accumulator.py   counters, observations and timers between two steps
throughput.py    tokens per second and model FLOPs utilization of a learner
guardrails.py    bounds on metrics, which end a run that has gone wrong
"""
