"""The CUDA path: SGLang servers, the PyTorch FSDP2 learner, and the transports between them.

plugin.py           the plugins `sglang` and `fsdp`
config.py           the section `fsdp` of the config
learner.py          the PyTorch learner over a mesh of ranks
policy.py           its network, and the sets of weights that take turns in it
critic.py           the critic; teacher.py, the teacher of on-policy distillation
phase.py            an optimizer on some parameters, and its step
rows.py             micro-batches of this rank
adapters.py         share of the adapters' update that merging rounds away
state.py            the checkpoint as shards and by HF names; portable.py, without a learner
devices.py          GPUs of this machine, counted without torch
distributed.py      the ranks of a learner
transports.py       ways of weights to servers, and which ones a run may take
ipc.py              by handles of shared memory, on the same devices
broadcast.py        by NCCL or gloo; buckets.py, what both have in common
footprint.py        memory and time by arithmetic, for a plan
without_data.py     memory of an update on tensors without data, for a plan
tensor_memory.py    counts the memory of such tensors
compiled_layers.py  layers as torch.compile would run them, on such tensors
"""

FORMAT = "rljax.torch/1"  # format of the learner's checkpoints, in their meta.json
