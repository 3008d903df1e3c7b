"""Arithmetic in JAX: model, losses, log-probs, sharding, optimizer, checkpoints. Stateless.

model.py           transformers in flax nnx, told apart by a `ModelSpec`
parameters.py      each parameter, declared once: place, HF name, mesh axes
hf.py              parameters from HF directories and to them, shard by shard
lora.py            low-rank adapters beside a frozen model
forward.py         log-probs, entropies and values of packed rows, on any mesh
attention/         attention over packed rows, an implementation per kernel
logprobs.py        log-probs and entropy without [M, V] logits; fused.py, with the objective
losses.py          the terms of the objective, as rljax/objective/losses.py defines them
objective.py       terms put together, with the metrics of an update
accumulate.py      one optimizer step over any number of micro-batches
optim.py           AdamW: schedule, clipping, steps that are skipped
rounding.py        share of an update that the published dtype rounds away
cached.py          the model over a paged cache: what a sampler runs
decode_attention/  attention over that cache
sampling.py        one draw from the distribution that a request asks for
mesh.py            the mesh of a pool, and how rows lie on it
sharding.py        how parameters, activations and caches are split over a mesh
multihost.py       devices of several processes
platforms.py       the platform that a kernel is made for
checkpoint.py      trees of arrays on disk by orbax
portable.py        parameters and moments by HF names, to move between engines
profile.py         which operations took the time of a device
"""
