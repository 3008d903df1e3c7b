"""The training batch: packed rows of trajectories as numpy arrays, the same for every learner."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Batch:
    """R packed rows of T tokens.

    Index t of every array is about token t itself: logp[r, t] is the log-probability of
    token_ids[r, t] given the tokens before it in its segment.

    `loss_weight` carries aggregation and the global normalizer: the objective of a minibatch is
    sum(loss_weight * token_loss), so that splitting rows over micro-batches or ranks changes
    nothing. It is zero exactly where `loss_mask` is False.
    """

    token_ids: np.ndarray  # [R, T] int32; 0 on padding
    segment_ids: np.ndarray  # [R, T] int32: 0 on padding, 1, 2, ... along a row, one a trajectory
    positions: np.ndarray  # [R, T] int32: 0, 1, ... within a segment
    loss_mask: np.ndarray  # [R, T] bool
    loss_weight: np.ndarray  # [R, T] float32
    behavior_logp: np.ndarray  # [R, T] float32, nats
    versions: np.ndarray  # [R, T] int32
    advantage: np.ndarray  # [R, T] float32
    proximal_logp: np.ndarray | None = None  # [R, T] float32, nats; None: the learner takes logp itself (ratio 1)
    reference_logp: np.ndarray | None = None  # [R, T] float32, nats; only with a KL term in the loss
    teacher_logp: np.ndarray | None = None  # [R, T] float32, nats; only with distillation
    interpolation: np.ndarray | None = (
        None  # [R, T] float32 in [0, 1], rljax/objective/proximal.py; only with prox_logp_method "loglinear"
    )
    values: np.ndarray | None = None  # [R, T] float32, reward units; only with a critic
    returns: np.ndarray | None = None  # [R, T] float32, reward units; only with a critic
    pictures: np.ndarray | None = None  # [R, B] uint8, the pictures of each row (rljax/batching/pictures.py); None: text alone

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.token_ids.shape
        return rows, length

    def replace(self, **arrays: Any) -> Batch:
        return dataclasses.replace(self, **arrays)
