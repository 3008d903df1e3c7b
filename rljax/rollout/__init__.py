"""Rollouts: prompts become groups of trajectories that may be trained on.

workflow.py       the interface of an episode, which users implement
producer.py       keeps prompts in flight: requests, episodes and groups, with timeouts and retries
gathering.py      calls that the episodes of a group make together
result.py         trajectories and failures of one prompt's episodes
tracker.py        decides what happens to a prompt: accepted, rejected, requeued or dropped
buffer.py         the versioned rollout buffer: what may be generated, what may be trained on
limits.py         limits of the buffer, and the number of steps of a run
journal.py        writes groups to disk as soon as they are finished
trajectories.py   token ids to trajectories
batch_metrics.py  metrics and histograms of a batch of groups
evaluation.py     runs the workflow without a learner
dump.py           groups as files
"""
