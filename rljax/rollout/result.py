"""What came of the episodes of one prompt: trajectories, and failures as values."""

from __future__ import annotations

import dataclasses

from rljax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Failure:
    """Of one episode."""

    kind: str
    error: Exception

    @property
    def reason(self) -> str:
        """One line."""
        return " ".join(f"{self.kind}: {type(self.error).__name__}: {self.error}".split())


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of the episodes of one prompt."""

    trajectories: tuple[Trajectory, ...]
    failures: tuple[Failure, ...]
    wanted: bool  # it has tokens to train on, and the filter wants it
