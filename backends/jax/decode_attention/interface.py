"""What an implementation of decode attention is, and what it is asked to do."""

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
    heads: int
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
        lengths: Array,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Array:
        r"""Softmax attention of grouped query heads over the last tokens of each row.

        .. math:: \mathrm{softmax}_s(c \tanh(q \cdot k_s\,\mathrm{scale} / c))\, v_s,\quad
                  \mathrm{length} - \mathrm{window} \le s < \mathrm{length}

        Args:
          query: [B, N, D], N a multiple of K.
          key, value: [B, K, S, D], a layer's cache.
          lengths: [B] int32, tokens to see of each row; of a row of length 0 the result is finite and means nothing.
          softcap: c; None for no cap.
          window: tokens seen at most; None: all.

        Returns:
          [B, N, D] in the dtype of query.
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
