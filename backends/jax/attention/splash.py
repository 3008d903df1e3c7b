"""Splash attention, jax's Pallas kernel for TPU: blocks of the mask that hide everything are never
computed.

Segments are compared inside the kernel, so rows are padded to whole tiles with padding of segment
0.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.backends.jax.attention.interface import Bounds, Problem, Window, by_window, per_device
from rljax.backends.jax.platforms import lacking

TILE = 128  # tokens; lanes of a vector register
BLOCKS = (512, 256, TILE)  # tokens of query and key blocks, the first that divides the row


@dataclasses.dataclass(frozen=True)
class SplashAttention:
    """Implements `Attention` by the splash kernel. interpret: runs the kernel's program without a
    TPU, for tests.
    """

    name: str = "splash"
    interpret: bool = False

    def refusal(self, problem: Problem) -> str | None:
        if not self.interpret and (reason := lacking(self.name, problem.platform)):
            return reason
        if problem.dtype not in ("bfloat16", "float32"):
            return f"it computes in bfloat16 or float32, not {problem.dtype}"
        return None

    def bounds(self, segment_ids: np.ndarray) -> None:
        return None

    def segments(self, segment_ids: Array, bounds: Bounds | None) -> Array:
        return segment_ids

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        scale: float,
        softcap: float | None = None,
        segments: Array | None = None,
        window: Window = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> Array:
        def attend(window: int | None) -> Array:
            local = functools.partial(self._local, scale=scale, softcap=softcap, window=window)
            return per_device(local, query, key, value, segments)

        return by_window(attend, window, windows, query.shape[1])

    def _local(
        self,
        query: Array,
        key: Array,
        value: Array,
        segment_ids: Array | None,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Array:
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        rows, length = query.shape[:2]
        extra = -length % TILE
        if segment_ids is None:
            segment_ids = jnp.ones((rows, length), jnp.int32)
        ids = jnp.pad(segment_ids, ((0, 0), (0, extra)))
        # [B, T, heads, D] -> [B, heads, T, D]
        wide = (jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, extra), (0, 0))) for x in (query * scale, key, value))
        kernel = _kernel(query.shape[2], length + extra, softcap, window, self.interpret)
        out = jax.vmap(kernel)(*wide, SegmentIds(ids, ids))
        return out.swapaxes(1, 2)[:, :length].astype(value.dtype)


def _kernel(heads: int, length: int, softcap: float | None, window: int | None, interpret: bool) -> jax.tree_util.Partial:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (length, length)
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in BLOCKS if length % size == 0)
    with jax.ensure_compile_time_eval():  # what it works out of the mask are constants
        return splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads),
            block_sizes=splash.BlockSizes(
                block_q=block,
                block_kv=block,
                block_kv_compute=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_kv_dkv_compute=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )
