"""Attention over packed rows for transformers' models: a token sees earlier tokens of its segment.

Registered with transformers as `IMPLEMENTATION`; the model's layers pass the `Segments` of the
micro-batch through to it. On a GPU in half precision it is FlashAttention over the segments
(torch.nn.attention.varlen), elsewhere SDPA with a mask. With context parallelism a rank has a slice
of every row: it gathers keys and values of the whole row, and its own queries attend to them.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rljax.backends.torch.context_parallel import Context

IMPLEMENTATION = "rljax_packed"
HALF = (torch.bfloat16, torch.float16)
_ABLE = inspect.signature(varlen_attn).parameters  # differ between torch 2.11 and 2.14


@dataclasses.dataclass
class Segments:
    """The segments of a micro-batch's rows, whole rows also if a rank has only a slice of them.

    Example: Segments.of(np.array([[1, 1, 2, 0]]), torch.device("cpu"))
    """

    ids: Tensor  # [r, T] int32: 0 on padding, 1, 2, ... along a row
    query_starts: Tensor  # [n + 1] int32: where each run of equal ids begins among this rank's r * (T / context) queries
    key_starts: Tensor  # [n + 1] int32: the same among the keys that those queries see
    seen: Tensor | None  # indices of those among the r * T keys; None for all
    longest: int  # tokens of the longest run
    context: Context
    masks: dict[int | None, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, ids: np.ndarray, device: torch.device, context: Context | None = None) -> Segments:
        """Makes the segments of ids, [r, T] int32; T is a multiple of the context's size."""
        context = context or Context()
        first, queries, keys = _runs(ids, context)
        starts = [torch.from_numpy(np.cumsum(np.append(0, n)).astype(np.int32)).to(device) for n in (queries, keys)]
        seen = None
        if context.size > 1:
            before = np.cumsum(keys) - keys
            seen = torch.from_numpy(np.repeat(first - before, keys) + np.arange(keys.sum())).to(device)
        return cls(torch.from_numpy(ids).to(device), starts[0], starts[1], seen, int(keys.max()), context)

    def mask(self, window: int | None) -> Tensor:
        """Returns which keys each query sees, [r, 1, T / context, T] bool. Cached by window."""
        if window not in self.masks:
            length = self.ids.shape[1]
            key = torch.arange(length, device=self.ids.device)
            own = self.context.slice(length)
            query = key[own, None]
            sees = (key <= query) if window is None else (key <= query) & (query - key < window)
            self.masks[window] = (sees & (self.ids[:, own, None] == self.ids[:, None, :]))[:, None]
        return self.masks[window]


def _runs(ids: np.ndarray, context: Context) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds the runs of equal ids that have queries in this rank's slice; each array is [n] int64.

    Returns:
      Index of a run's first token among all r * T, number of its queries in the slice, and number
      of keys that those see. A query sees the keys of its run up to its own, so the keys end where
      the slice does.
    """
    rows, length = ids.shape
    own = context.slice(length)
    begins = np.ones((rows, length), bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], rows * length)
    row = first // length * length
    start, stop = np.maximum(first, row + own.start), np.minimum(last, row + own.stop)
    has = start < stop
    return first[has], (stop - start)[has], (stop - first)[has]


@torch.compiler.disable  # compiled layers are split around it: a micro-batch's segments are not part of the graph
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    segments: Segments,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes attention; transformers calls it in every layer.

    Args:
      query: [r, heads, T / context, D], rotated.
      key, value: [r, key/value heads, T / context, D]; key is rotated.
      sliding_window: tokens that a query sees, itself included; None for all.

    Returns:
      [r, T / context, heads, D], and no weights.
    """
    key, value = segments.context.gather(key, 2), segments.context.gather(value, 2)
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap is not None:
        out = _capped(query, key, value, segments.mask(sliding_window), scaling, softcap)
    elif query.is_cuda and query.dtype in HALF and (sliding_window is None or "window_size" in _ABLE):
        return _flash(query, key, value, segments, sliding_window, scaling), None
    else:
        mask = segments.mask(sliding_window)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None, scaling: float) -> Tensor:
    rows, heads, length, width = query.shape
    settings: dict[str, Any] = {"is_causal": True}
    if "window_size" in _ABLE:
        settings = {"window_size": (-1 if window is None else window - 1, 0)}
    if "scale" in _ABLE:
        settings["scale"] = scaling
    else:
        query = query * (scaling * width**0.5)
    if "enable_gqa" in _ABLE:
        settings["enable_gqa"] = heads != key.shape[1]
    else:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    key, value = (_seen(x.transpose(1, 2), segments) for x in (key, value))
    attend: Callable[..., Any] = varlen_attn
    out = attend(
        query.transpose(1, 2).reshape(rows * length, heads, width),
        key,
        value,
        segments.query_starts,
        segments.key_starts,
        segments.longest,
        segments.longest,
        **settings,
    )
    return out.view(rows, length, heads, width)


def _seen(whole: Tensor, segments: Segments) -> Tensor:
    """Selects from [r, T, heads, D] the keys that this rank's queries see, one run after the other."""
    flat = whole.reshape(-1, *whole.shape[2:])
    return flat if segments.seen is None else flat[segments.seen]


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Computes attention whose logits are squashed to +-softcap; no fused kernel supports that."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    logits = torch.tanh((query @ key.transpose(2, 3)).float() * (scaling / softcap)) * softcap
    return torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1).to(value.dtype) @ value


AttentionInterface.register(IMPLEMENTATION, packed_attention)
