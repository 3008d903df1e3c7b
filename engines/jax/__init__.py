"""The JAX path: a continuous-batching sampler and a sharded learner, on TPU, GPU or CPU."""

FORMAT = "rljax.jax/1"  # of the learner's checkpoints, in their meta.json
