"""The CUDA path: SGLang servers, the PyTorch FSDP2 learner, and the transports between them.

learning/    the learner over a mesh of ranks
transports/  ways of weights to servers
planning/    memory and time of a run, by arithmetic and on tensors without data
plugin.py    the plugins `sglang` and `fsdp`
config.py    the section `fsdp` of the config
devices.py   GPUs of this machine, counted without torch
"""

FORMAT = "rljax.torch/1"  # format of the learner's checkpoints, in their meta.json
