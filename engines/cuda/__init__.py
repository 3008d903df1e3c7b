"""The CUDA path: SGLang servers, the PyTorch FSDP2 learner, and the transports between them."""

FORMAT = "rljax.torch/1"  # format of the learner's checkpoints, in their meta.json
