"""Packed rows of random tokens: the batch of the benchmarks of learners."""

from __future__ import annotations

import dataclasses

import numpy as np

from rljax.batching.batch import Batch


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows that are alike, in each as many whole trajectories of one length as it is told, and what
    is left over as the beginning of another.

    Example: PackedRows(rows=8, tokens=2048, segments=27).completion == 38
    """

    rows: int
    tokens: int  # of a row
    segments: int  # trajectories of a row

    @property
    def prompt(self) -> int:
        """Tokens of a trajectory that are not trained on, its first half."""
        return self._length // 2

    @property
    def completion(self) -> int:
        """Tokens of a trajectory that are trained on."""
        return self._length - self.prompt

    @property
    def _length(self) -> int:
        return self.tokens // self.segments

    def batch(self, vocabulary: int, without_advantage: float = 0.0) -> Batch:
        """Makes the batch of a step, the same each time.

        Args:
          without_advantage: share of the trajectories whose advantage is 0.
        """
        random = np.random.default_rng(0)
        shape, length = (self.rows, self.tokens), self._length
        index = np.arange(self.tokens)
        positions = np.broadcast_to(index % length, shape).astype(np.int32)
        mask = positions >= self.prompt
        trajectories = self.rows * self.segments
        of_segments = random.permutation(trajectories) >= without_advantage * trajectories
        of_tokens = np.repeat(of_segments, length).reshape(self.rows, -1)
        active = np.pad(of_tokens, ((0, 0), (0, self.tokens - of_tokens.shape[1])))  # what is left of a row is another segment
        floats = {
            name: np.where(mask, random.normal(size=shape), 0).astype(np.float32) for name in ("advantage", "behavior_logp")
        }
        floats["advantage"] *= active
        return Batch(
            token_ids=random.integers(3, vocabulary, shape).astype(np.int32),
            segment_ids=np.broadcast_to(index // length + 1, shape).astype(np.int32),
            positions=positions,
            loss_mask=mask,
            loss_weight=(mask / mask.sum()).astype(np.float32),
            versions=np.zeros(shape, np.int32),
            **floats,
        )
