"""A batch without padding, for plans: shapes and masks of a full step, whose values mean nothing."""

from __future__ import annotations

import numpy as np

from rljax.batching.batch import Batch


def full_batch(rows: int, length: int, *, interpolated: bool = False) -> Batch:
    """Makes rows of one trajectory each, with every array that an update may ask for.

    All trained tokens have an advantage, so that each takes its gradient.

    Args:
      rows, length: R and T.
      interpolated: with the weights of the "loglinear" proximal policy.

    Example: full_batch(8, 2048)
    """
    shape, where = (rows, length), np.arange(length)
    ones, floats = np.ones(shape, np.int32), np.zeros(shape, np.float32)
    return Batch(
        token_ids=ones,
        segment_ids=ones,
        positions=np.broadcast_to(where.astype(np.int32), shape),
        loss_mask=np.broadcast_to(where >= 1, shape),
        loss_weight=np.ones(shape, np.float32),
        behavior_logp=floats,
        versions=ones,
        advantage=np.ones(shape, np.float32),
        proximal_logp=floats,
        reference_logp=floats,
        teacher_logp=floats,
        interpolation=floats if interpolated else None,
    )
