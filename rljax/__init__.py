"""rljax: asynchronous reinforcement learning for language models, on a CUDA path and a JAX path
behind one engine interface.
"""

__version__ = "0.1.0"
