"""rljax: asynchronous reinforcement learning for language models, on CUDA and on JAX.

import rljax
from rljax.configs import quickstart

rljax.train(quickstart.get_config(), workdir="runs/quickstart", reward=my_function)
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_CALLS = {"train": "rljax.experiments.library"}  # imported when they are used, with all that is below them


def __getattr__(name: str) -> Any:
    if name in _CALLS:
        return getattr(importlib.import_module(_CALLS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
