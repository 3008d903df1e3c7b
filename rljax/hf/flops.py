"""Floating-point operations of a training step by the model alone, the base of MFU on every path."""

from __future__ import annotations

import numpy as np

from rljax.hf.other_model import Model
from rljax.hf.tensors import matrix_parameters


def update_flops(spec: Model, segment_ids: np.ndarray, trained: int, *, adapters: bool = False) -> float:
    """Returns the FLOPs of the forward and backward pass over packed rows.

    2 per matrix parameter and token forward, 4 backward (2 with adapters, whose frozen matrices
    have no gradient), the unembedding for trained tokens alone; attention over the keys that each
    token sees. Norms, softmax, the adapters themselves and recomputation are not counted.

    Args:
      segment_ids: [R, T] int32, 1, 2, ... along a row and 0 on padding.
      trained: tokens whose log-probs are needed.
      adapters: whether low-rank adapters are trained in place of the matrices.
    """
    inner = matrix_parameters(spec)
    tokens = np.count_nonzero(segment_ids)
    forward = 2.0 * inner * tokens + 2.0 * spec.vocab_size * spec.hidden_size * trained
    lengths = np.concatenate([np.bincount(row)[1:] for row in segment_ids])
    attention = 4.0 * spec.num_heads * spec.head_dim * sum(_pairs(lengths, window) for window in spec.windows)
    return (2 if adapters else 3) * forward + 3 * attention


def attention_flops(spec: Model, cached: int, new: int) -> float:
    """Returns the FLOPs of attention of `new` tokens of a row over the `cached` before them, and
    over each other.
    """
    lengths = np.asarray([cached + new, cached])
    pairs = np.sum([_pairs(lengths[:1], window) - _pairs(lengths[1:], window) for window in spec.windows])
    return 4.0 * spec.num_heads * spec.head_dim * float(pairs)


def _pairs(lengths: np.ndarray, window: int | None) -> float:
    """Counts pairs of a token and a key that it sees, over causal segments."""
    lengths = lengths.astype(np.float64)
    whole = lengths if window is None else np.minimum(lengths, window)  # tokens that see all before them
    return float((whole * (whole + 1) / 2 + (lengths - whole) * whole).sum())
