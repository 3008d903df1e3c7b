"""A program of a plan, compiled or tried for devices that are not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Program:
    """Memory of a program, as a compiler or a step on tensors without data says it.

    Example: Program("update", how="attention splash", moments=("loss",), peak=3.4e9)
    """

    name: str
    how: str  # the attention that it was compiled with, or how else its memory was found
    moments: tuple[str, ...] = ()  # moments of the estimate that it goes through; none: there is no estimate of it
    peak: float | None = None  # bytes of a device; None if the compiler says that it does not fit
    seconds: float = 0.0  # to compile, or to step
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by name, times called in its text
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)  # likewise
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)  # bytes at the peak, where they are told apart
    problem: str = ""  # why it does not fit, in the compiler's words
