"""The CUDA path: SGLang servers, the PyTorch FSDP2 learner, and the ways for weights between them."""

FORMAT = "rljax.torch/1"  # of the learner's checkpoints, in their meta.json
