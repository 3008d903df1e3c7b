"""Compaction: leaves out of a batch the tokens that are not trained on, before the unembedding.

The unembedding is most of a small model's arithmetic, and prompt tokens and padding need none of
it. Rows are kept, so that a batch sharded by rows stays sharded by rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from rljax.batching.batch import Batch
from rljax.objective.spec import TokenArrays

BUCKETS = 8  # most widths per row length, and so most compilations


@dataclasses.dataclass(frozen=True)
class Compacted:
    """The kept tokens of each row, moved to the left. Columns after a row's tokens are padding.

    The width m is the same for all rows.

    Example: logits of the kept tokens are hidden[rows, compacted.source] @ unembedding.T
    """

    source: (
        np.ndarray
    )  # [R, m] int32: where in the row the hidden state that predicts the token is (its index - 1); 0 on padding
    labels: np.ndarray  # [R, m] int32: token ids; 0 on padding
    tokens: TokenArrays  # [R, m] numpy arrays; segment_ids numbered anew, 1 to at most m
    length: int  # T of the rows it came from

    def scatter(self, values: np.ndarray) -> np.ndarray:
        """Moves [R, m] values of the kept tokens back to their columns: [R, T], 0 elsewhere."""
        out = np.zeros((len(values), self.length), dtype=values.dtype)
        row, column = np.nonzero(self.tokens.mask)
        out[row, self.source[row, column] + 1] = values[row, column]
        return out


def bucket(count: int, length: int) -> int:
    """Returns the smallest of BUCKETS widths that fits `count` tokens.

    The widths are equal steps up to `length`.
    """
    step = -(-length // BUCKETS)
    return min(max(-(-count // step), 1) * step, length)


def kept(batch: Batch) -> np.ndarray:
    """Returns the tokens an update needs, [R, T] bool: all that are trained on.

    Those of advantage 0 may have no gradient, but the update's metrics are of all trained tokens.
    """
    return batch.loss_mask & (batch.loss_weight != 0)


def compact(batch: Batch, keep: np.ndarray, width: int | None = None) -> Compacted:
    """Gathers the kept tokens of each row.

    Args:
      keep: [R, T] bool: `kept(batch)` for an update, `batch.loss_mask` for a score
        pass.
      width: m; None: the least bucket that holds the fullest row. Ranks that run one program must
        agree on it.
    """
    length = batch.shape[1]
    counts = keep.sum(axis=1)
    width = bucket(int(counts.max(initial=0)), length) if width is None else width
    if counts.max(initial=0) > width:
        raise ValueError(f"a row keeps {counts.max()} tokens and the width is {width}")
    if keep[:, :1].any():
        raise ValueError("token 0 has no context and cannot be trained on")
    order = np.argsort(~keep, axis=1, kind="stable")[:, :width]  # kept tokens first, in their order
    mask = np.arange(width) < counts[:, None]

    def gather(array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        return np.where(mask, np.take_along_axis(array, order, axis=1), np.zeros((), array.dtype))

    tokens = TokenArrays(
        loss_weight=gather(batch.loss_weight),
        mask=mask,
        advantage=gather(batch.advantage),
        behavior_logp=gather(batch.behavior_logp),
        segment_ids=_renumbered(np.take_along_axis(batch.segment_ids, order, axis=1), mask),
        proximal_logp=gather(batch.proximal_logp),
        reference_logp=gather(batch.reference_logp),
        interpolation=gather(batch.interpolation),
        versions=gather(batch.versions),
        teacher_logp=gather(batch.teacher_logp),
    )
    source = np.where(mask, order - 1, 0).astype(np.int32)
    return Compacted(source, np.where(mask, np.take_along_axis(batch.token_ids, order, axis=1), 0), tokens, length)


def _renumbered(segment_ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Numbers the segments that are left 1, 2, ... along each row, 0 on padding."""
    starts = mask.copy()
    starts[:, 1:] &= segment_ids[:, 1:] != segment_ids[:, :-1]
    return np.where(mask, np.cumsum(starts, axis=1), 0).astype(np.int32)
