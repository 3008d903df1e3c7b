"""Flight recorder: the batches of the last steps, and making a step again from them.

recorder.py    writes the batch of each step, in a thread of its own
recording.py   what was written, and which steps can be made again
replayer.py    brings a learner to the state after any recorded step
comparison.py  metrics of a step as recorded and as made again
store.py       files of the recorder, and which of them are deleted
rescore.py     scores a batch again; critic_fit.py trains the critic alone on it

WORKDIR/flight/<step>/step.json            format, step, version, parent, config
                     /batch.safetensors    token ids, masks, log-probs, versions (rollout/dump.py)
                     /batch.json           groups, rewards, components
                     /scores.safetensors   advantages, proximal log-probs, ..., where there are any
WORKDIR/flight/config-<digest>.json        configs that the steps name
WORKDIR/flight/kept.jsonl                  steps at which a guard or a rule spoke, and why

The parent of a step is the step whose learner it began with: the one before it. A rollback, which
counts as a step, has a step.json alone; its parent is the step of the checkpoint it went back to. A
step is made again from its nearest ancestor with a checkpoint, by making all steps between them.
"""
