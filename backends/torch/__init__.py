"""Stateless arithmetic in PyTorch: model, losses, log-probs, parallelism, optimizer, checkpoints.

model.py              transformers' model of a directory, sharded by FSDP2
vision.py             the frozen tower of an image-text model
lora.py               low-rank adapters by peft
attention.py          attention over packed rows for transformers' models
packing_probe.py      tries on a model that packing changes no log-prob
forward.py            log-probs, objectives and values of packed rows, on any mesh
logprobs.py           log-probs and entropy without [M, V] logits; fused.py, with the objective
losses.py             the terms of the objective, as rljax/objective/losses.py defines them
objective.py          terms put together, with the metrics of an update
accumulate.py         sums over micro-batches and ranks
optim.py              AdamW on shards: schedule, clipping
rounding.py           share of an update that the published dtype rounds away
mesh.py               the mesh of a pool's ranks, and what each rank has
tensor_parallel.py    heads, widths and vocabulary over ranks
context_parallel.py   slices of rows over ranks
export.py             whole tensors of sharded parameters, by HF names
checkpoint.py         named tensors on disk by torch.distributed.checkpoint
checkpoint_reader.py  reads such files without running what they say
"""
