"""Inputs that experiments.parity gives to both paths, and the results of each."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import numpy as np

from rljax.batching.compaction import Compacted
from rljax.config.schema import Config
from rljax.objective.spec import Objective

STEPS = 100  # assumed if the data decides the number of steps; only the schedule uses it


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of both paths."""

    config: Config
    model_dir: Path
    objective: Objective
    token_ids: np.ndarray  # [R, T] int32
    compacted: Compacted  # the trained tokens, [R, m]
    dtype: str

    @property
    def master(self) -> str:
        """The dtype of master weights and moments, as in the learners.

        float32, or float64 for a float64 case.
        """
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def total_steps(self) -> int:
        return (self.config.total_train_steps or STEPS) * self.config.actor.ppo_n_minibatches

    @property
    def factors(self) -> tuple[float, float]:
        """Factors of the gradient in two steps; equal ones would not show the betas."""
        return (1.0, -0.5)

    def gradient(self, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draws float64 noise for the optimizers alone, some of it so small that eps counts."""
        random = np.random.default_rng([self.config.seed, zlib.crc32(tensor.encode())])
        return random.normal(size=shape) * 10.0 ** random.uniform(-10, -2, shape)

    @property
    def positions(self) -> np.ndarray:
        return np.broadcast_to(np.arange(self.token_ids.shape[1], dtype=np.int32), self.token_ids.shape).copy()


@dataclasses.dataclass(frozen=True)
class Result:
    """Results of one path."""

    logp: np.ndarray  # [R, m]
    entropy: np.ndarray  # [R, m]
    loss: float
    gradients: dict[str, np.ndarray]  # by tensor name
    step: dict[str, np.ndarray]  # change in one optimizer step, by tensor name
