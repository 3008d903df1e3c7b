"""The config section `fsdp`.

The section `sglang` is beside its servers, in rljax/engines/http/config.py.
"""

from __future__ import annotations

import dataclasses

from rljax.config.keys import key
from rljax.config.schema import EngineConfig

WORKSPACE_BYTES = 2 * 32 << 20  # of cuBLAS on a Hopper or a newer GPU: of the thread that calls, and of autograd's


@dataclasses.dataclass(frozen=True)
class FsdpConfig(EngineConfig):
    """Settings of the PyTorch learner."""

    compile: bool = key(
        True, "Compile layers with torch.compile on a GPU: a minute at the start, then fewer passes over memory."
    )
