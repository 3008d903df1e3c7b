"""The asynchronous side: from prompts to groups that may be trained on.

workflow.py       what an episode is: the interface that users implement
producer.py       keeps prompts in flight
result.py         what came of the episodes of one prompt
tracker.py        what becomes of a prompt: accepted, rejected, tried again, dropped
buffer.py         what may be generated and what may be trained on: the versioned rollout buffer
limits.py         how much a run is: the buffer's limits, and steps in all
journal.py        finished groups on disk the moment they are finished
trajectories.py   token ids to trajectories
evaluation.py     the same workflow with no learner
dump.py           groups as files
"""
