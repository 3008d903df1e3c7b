"""cuDNN's flash attention over packed rows, on NVIDIA GPUs from Hopper on.

Its packed layout takes segments of any length by their offsets in memory, whatever rows they lie
in. So rows [B, T] are shown to it as blocks [B T / longest, longest], with room for the segments
that begin in each: what it launches and keeps grows with the longest segment, not with the row.
jax has no public function for that layout: `_packed` alone uses a private one, and `JAX_VERSIONS`
says where it was run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.backends.jax.attention.interface import Bounds, Problem, Window, by_window, per_device, starts_of_segments
from rljax.backends.jax.platforms import lacking

JAX_VERSIONS = ((0, 11), (0, 12))  # from, to before
HOPPER = (9, 0)
DTYPES = ("bfloat16", "float16")
SHORTEST = 128  # tokens of `longest`: a tile of the kernel
# Tokens of `longest` up to which key heads are repeated for their query heads. cuDNN's own sum of the gradients over a group
# of query heads takes time by the segment, and with many short ones it is slower than XLA's.
REPEATED = 256


@contextlib.contextmanager
def lowered_for(device: jax.Device) -> Iterator[None]:
    """Has jax judge what cuDNN can do by this GPU; it would ask an attached one."""
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo

    def version(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    questions: dict[str, Any] = {
        "check_compute_capability": lambda least: version(capability) >= version(least),
        "is_cuda_compute_capability_equal": lambda other: version(capability) == version(other),
    }
    with mock.patch.multiple(fused_attention_stablehlo, **questions):
        yield


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Offsets and lengths of the segments that begin in each block of `longest` tokens, as cuDNN
    takes them.
    """

    lengths: Array  # [blocks, starts] int32, tokens; -1: there is no such segment
    offsets: Array  # [blocks, starts + 1] int32, of the first token in the block; -1: there is no such segment
    longest: int = dataclasses.field(metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class CudnnAttention:
    """Implements `Attention` by cuDNN."""

    name: str = "cudnn"

    def refusal(self, problem: Problem) -> str | None:
        if reason := lacking(self.name, problem.platform if problem.capability else "another GPU's"):
            return reason
        assert problem.capability is not None
        if problem.capability < HOPPER:
            return f"it needs compute capability 9.0 (Hopper) for packed rows, and this GPU is {_dotted(problem.capability)}"
        if problem.dtype not in DTYPES:
            return f"it computes in {' or '.join(DTYPES)}, not {problem.dtype}"
        if problem.head_dim % 8 or problem.head_dim > 256:
            return f"its heads are of a multiple of 8 dimensions up to 256, not {problem.head_dim}"
        if problem.softcap is not None:
            return "it has no soft-cap"
        if not JAX_VERSIONS[0] <= jax.__version_info__[:2] < JAX_VERSIONS[1]:
            return f"its packed rows were tried with jax {_dotted(JAX_VERSIONS[0])} only, and this is {jax.__version__}"
        return None

    def bounds(self, segment_ids: np.ndarray) -> Bounds:
        length = segment_ids.shape[1]
        longest = _block(length, _longest_run(segment_ids))
        starts = starts_of_segments(segment_ids, longest, np).reshape(-1, longest).sum(axis=1)
        return Bounds(longest, _power_of_two(max(int(starts.max(initial=0)), 2)))  # at 1 the layout is another one

    def segments(self, segment_ids: Array, bounds: Bounds | None) -> Segments:
        if bounds is None:
            raise ValueError("cuDNN's packed rows are compiled for bounds of their segments: bounds(segment_ids)")
        return _layout(segment_ids, bounds)

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        scale: float,
        softcap: float | None = None,
        segments: Segments | None = None,
        window: Window = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> Array:
        if softcap is not None:
            raise ValueError("cuDNN has no soft-cap")

        def attend(window: int | None) -> Array:
            local = functools.partial(_whole_rows if segments is None else _packed, scale=scale, window=window)
            return per_device(local, query, key, value, segments)

        return by_window(attend, window, windows, query.shape[1] if segments is None else segments.longest)


def _whole_rows(query: Array, key: Array, value: Array, segments: None, *, scale: float, window: int | None) -> Array:
    """Rows of one segment each, by jax's public function."""
    seen = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=True, local_window_size=seen, implementation="cudnn"
    )


def _packed(query: Array, key: Array, value: Array, segments: Segments, *, scale: float, window: int | None) -> Array:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    if segments.longest <= REPEATED:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    blocks = [x.reshape(-1, segments.longest, *x.shape[2:]) for x in (query, key, value)]
    out = dot_product_attention(
        blocks[0],
        blocks[1],
        blocks[2],
        q_seqlen=segments.lengths,
        kv_seqlen=segments.lengths,
        q_offsets=segments.offsets,
        kv_offsets=segments.offsets,
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
    )
    return out.reshape(query.shape)


def _layout(segment_ids: Array, bounds: Bounds) -> Segments:
    """Padding is in segments of its own: cuDNN leaves what lies in none uninitialized, in the
    gradient too.
    """
    rows, length = segment_ids.shape
    blocks, starts = length // bounds.longest, bounds.starts
    begins = starts_of_segments(segment_ids, bounds.longest).reshape(rows, blocks, bounds.longest)
    # Indices that begin something, ascending; `longest` where there are no more
    found = jnp.sort(jnp.where(begins, jnp.arange(bounds.longest, dtype=jnp.int32), bounds.longest), axis=2)[..., :starts]
    there = found < bounds.longest
    first = jnp.where(there, found + jnp.arange(blocks, dtype=jnp.int32)[:, None] * bounds.longest, length)
    first = first.reshape(rows, -1)
    following = jnp.pad(jax.lax.cummin(first, axis=1, reverse=True)[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    lengths = jnp.where(there, (following - first).reshape(there.shape), -1)
    offsets = jnp.pad(jnp.where(there, found, -1), ((0, 0), (0, 0), (0, 1)), constant_values=-1)
    return Segments(lengths.reshape(-1, starts), offsets.reshape(-1, starts + 1), bounds.longest)


def _longest_run(segment_ids: np.ndarray) -> int:
    """Tokens of the longest segment, padding not counted."""
    begins = np.flatnonzero(starts_of_segments(segment_ids, segment_ids.shape[1], np))
    lengths = np.diff(np.append(begins, segment_ids.size))
    return int(lengths[segment_ids.reshape(-1)[begins] != 0].max(initial=1))


def _block(length: int, longest: int) -> int:
    """Least power of two that holds the longest segment and divides the row, else the row."""
    size = max(SHORTEST, _power_of_two(longest))
    return size if size < length and length % size == 0 else length


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
