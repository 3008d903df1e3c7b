"""The JAX path: a continuous-batching sampler and a sharded learner, on TPU, GPU or CPU.

plugin.py        the engine `jax`
config.py        its section of the config
tuning.py        settings that a config leaves to the device
distributed.py   the processes of a learner
sampler.py       the sampler: continuous batching over slots
scheduler.py     its loop, in a thread: admit, prefill, decode, collect
programs.py      its compiled programs over a paged cache
slots.py         the request in each slot; orders.py, their state on the device
pages.py         pages of the cache, and the index of the tokens in them
cache_size.py    size of the cache; usable_memory.py, what JAX may use of a device
stop_strings.py  stop strings in the text of a completion
scoring.py       the bitwise mode: one program scores for both sides
learner.py       the learner over a mesh of data, fsdp and tensor axes
policy.py        its network, what is trained of it and what is frozen
critic.py        the critic; teacher.py, the teacher of on-policy distillation
phase.py         an optimizer on some parameters, and its step
functions.py     what is differentiated and compiled
rows.py          micro-batches on the mesh; row_lengths.py, the lengths they are padded to
state.py         a learner's state as a tree, and by HF names
footprint.py     memory and time by arithmetic, for a plan
compile_only.py  programs of a plan, compiled for devices that are not there
topology.py      how XLA is told of TPUs that are not there; cuda_target.py, of GPUs
hlo.py           searches of a compiled program's text
"""

FORMAT = "rljax.jax/1"  # of the learner's checkpoints, in their meta.json
