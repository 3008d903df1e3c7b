"""Interface of attention over a key/value cache, and the problems it is asked to solve."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything about a run that an implementation may be unable to do."""

    platform: str  # of the devices: "cpu", "gpu", "tpu"
    dtype: jnp.dtype  # of queries
    cache_dtype: jnp.dtype
    rows: int  # slots of the cache
    length: int  # tokens per slot
    kv_heads: int
    head_dim: int
    softcap: float | None
    row_shards: int = 1  # shards of the mesh that take rows
    head_shards: int = 1  # shards of the mesh that take heads


class Attend(Protocol):
    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        index: Array,
        rows: Array | None = None,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Array:
        r"""Softmax attention of grouped query heads; a query sees the keys of its row at or before
        its own index.

        .. math:: \mathrm{softmax}_s(c \tanh(q_t \cdot k_s\,\mathrm{scale} / c))\, v_s,\quad
                  \mathrm{index}_t - \mathrm{window} < s \le \mathrm{index}_t

        Args:
          query: [R, T, N, D], N a multiple of K.
          key, value: [B, K, S, D], a layer's cache.
          index: [R, T] int32, below S, of each query among the keys of its row; -1 is padding,
            whose result is finite and means nothing.
          rows: [R] int32, of each row in the cache, out of range only where all of its index is
            padding; None: R is B, in order.
          softcap: c; None for no cap.
          window: keys a query sees, itself included; None: all.

        Returns:
          [R, T, N, D] in the dtype of query.
        """
        ...


@dataclasses.dataclass(frozen=True)
class DecodeAttention:
    """One implementation."""

    name: str
    attend: Attend
    length_multiple: int = 1  # the cache is made this many tokens per slot, or a multiple

    def refusal(self, problem: Problem) -> str | None:
        """Why it can't, as an error says it; None where it can."""
        return None

    def padded(self, length: int) -> int:
        """Tokens per slot of the cache that holds `length`."""
        return -(-length // self.length_multiple) * self.length_multiple
