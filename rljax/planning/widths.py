"""Sizes of a layer's activations per token, and of its keys and values."""

from __future__ import annotations

import dataclasses
import math

from rljax.hf.spec import ModelSpec

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes, by the names of dtypes in configs


@dataclasses.dataclass(frozen=True)
class Widths:
    """Elements per token of a layer's activations on a device of a tensor-parallel group."""

    hidden: float
    queries: float
    keys: float  # of the values as well
    mlp: float
    attended: float  # output of the attention, and the queries as it reads them: an array of heads
    seen: float  # keys as it reads them, and of the values as well
    norms: int  # RMS norms over the hidden states
    qk_norm: bool

    @classmethod
    def of(cls, spec: ModelSpec, tensor: int, tile: int = 1) -> Widths:
        """
        Args:
          tensor: devices of a tensor-parallel group. Keys and values stay whole where it does not
            divide their heads.
          tile: elements of which an array's last dimension takes a multiple in memory.
        """

        def tiled(width: float) -> float:
            return math.ceil(width / tile) * tile

        heads = spec.num_heads / tensor
        return cls(
            hidden=tiled(spec.hidden_size),
            queries=tiled(heads * spec.head_dim),
            keys=tiled(spec.num_kv_heads * spec.head_dim / heads_split(spec, tensor)),
            mlp=tiled(spec.intermediate_size / tensor),
            attended=heads * tiled(spec.head_dim),
            seen=spec.num_kv_heads / heads_split(spec, tensor) * tiled(spec.head_dim),
            norms=4 if spec.gemma_norms else 2,
            qk_norm=spec.qk_norm,
        )

    @property
    def products(self) -> float:
        """Outputs of the layer's seven matrix products."""
        return self.queries + 2 * self.keys + 2 * self.mlp + 2 * self.hidden

    @property
    def everything(self) -> float:
        """Inputs of every product, kernel and norm, which is all that a backward pass reads.

        The feed-forward's product counts beside its two factors, rotated queries and keys beside
        those that a norm takes in.
        """
        normed = self.queries + self.keys if self.qk_norm else 0.0
        attention = 2 * self.attended + 2 * self.seen
        return 2 * self.norms * self.hidden + normed + attention + 3 * self.mlp


def heads_split(spec: ModelSpec, tensor: int) -> int:
    """Returns over how many devices of a tensor-parallel group key and value heads are split."""
    return tensor if spec.num_kv_heads % tensor == 0 else 1


def cache_bytes(spec: ModelSpec, dtype: str, tensor: int) -> float:
    """Returns the bytes of a token's keys and values in all layers, on each device."""
    heads = spec.num_kv_heads / heads_split(spec, tensor)
    return 2 * spec.num_layers * heads * spec.head_dim * SIZES[dtype]
