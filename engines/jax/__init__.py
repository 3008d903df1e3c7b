"""The JAX path: a continuous-batching sampler and a sharded learner, on TPU, GPU or CPU.

sampling/          the sampler: continuous batching over slots and a paged cache
learning/          the learner over a mesh of data, fsdp and tensor axes
planning/          memory and time of a run, by arithmetic and by XLA's compiler
plugin.py          the engine `jax`
config.py          its section of the config
tuning.py          settings that a config leaves to the device
usable_memory.py   what JAX may use of a device
rows.py            micro-batches on the mesh; row_lengths.py, the lengths they are padded to
scoring.py         the bitwise mode: one program scores for both sides
"""

FORMAT = "rljax.jax/1"  # of the learner's checkpoints, in their meta.json
