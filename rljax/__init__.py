"""rljax: asynchronous reinforcement learning for language models, on CUDA and on JAX."""

__version__ = "0.1.0"
