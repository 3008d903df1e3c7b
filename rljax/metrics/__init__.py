"""Metrics of a run.

mean.py           sums and counts, merged over micro-batches, ranks and steps
accumulator.py    counters, observations and timers between two steps
busy.py           time in which something is under way
histogram.py      histograms on edges that similar steps share
throughput.py     tokens per second and model FLOPs utilization of a learner
catalog.py        name, unit and meaning of every metric; writes docs/metrics.md
guardrails.py     bounds on metrics
guard_actions.py  what follows when one is broken
"""
