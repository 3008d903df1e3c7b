"""Keys of the shadow: the other path's learner beside a run (docs/parity.md)."""

from __future__ import annotations

import dataclasses

from rljax.config.keys import NOT_NEGATIVE, key


@dataclasses.dataclass(frozen=True)
class ParityConfig:
    """The shadow of a run: another engine's learner recomputes some of its batches."""

    shadow_every: int = key(
        0, "Steps from one batch that is recomputed to the next. 0: none is.", NOT_NEGATIVE, unit="training steps"
    )
    shadow_engine: str = key("", "Engine whose learner recomputes. Empty: fsdp, or jax for a run of fsdp.")
    shadow_device: str = key(
        "cpu", "Where it computes: on the host, or on the devices that the run uses.", choices=("cpu", "shared")
    )
