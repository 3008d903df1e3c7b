"""Result of one prompt's episodes: trajectories, and failures as values."""

from __future__ import annotations

import dataclasses

from rljax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Failure:
    """Failure of one episode."""

    kind: str
    error: Exception

    @property
    def reason(self) -> str:
        """Kind, type and message of the error, in one line."""
        return " ".join(f"{self.kind}: {type(self.error).__name__}: {self.error}".split())


@dataclasses.dataclass(frozen=True)
class Result:
    """Trajectories and failures of one prompt's episodes."""

    trajectories: tuple[Trajectory, ...]
    failures: tuple[Failure, ...]
    wanted: bool  # has tokens to train on, and the filter accepts it
