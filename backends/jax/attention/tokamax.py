"""tokamax's flash attention, an optional extra: for soft-caps, and for GPUs that cuDNN's packed
rows don't run on.

Its public function takes a mask of every query and key; the kernels take where each query's keys
begin, which is what a packed row needs. That mask is private to it: `_attend` alone uses it, and
`VERSIONS` says which releases were run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rljax.backends.jax.attention.interface import Bounds, Problem, Window, per_device, starts_of_segments
from rljax.backends.jax.platforms import lacking

VERSIONS = ("0.0.17",)
HOPPER = (9, 0)
AMPERE = (8, 0)


@dataclasses.dataclass(frozen=True)
class TokamaxAttention:
    """Implements `Attention` by tokamax: its Mosaic kernel on Hopper, its Triton kernel on other
    NVIDIA GPUs.
    """

    name: str = "tokamax"
    kernel: str = ""  # of tokamax; empty: that of the GPU

    def refusal(self, problem: Problem) -> str | None:
        if reason := lacking(self.name, problem.platform if problem.capability else "another GPU's"):
            return reason
        assert problem.capability is not None
        if problem.capability < AMPERE:
            return "it needs compute capability 8.0 or above"
        if problem.dtype not in ("bfloat16", "float16"):
            return f"it computes in bfloat16 or float16, not {problem.dtype}"
        version = _version()
        if version is None:
            return "tokamax is not installed (pip install 'rljax[tokamax]>=0.1', Python 3.12 or above)"
        if version not in VERSIONS:
            return f"it was tried with tokamax {', '.join(VERSIONS)} only, and this is {version}"
        return None

    def bounds(self, segment_ids: np.ndarray) -> None:
        return None

    def segments(self, segment_ids: Array, bounds: Bounds | None) -> Array:
        """Index of the first token that each token may see. [B, T] int32"""
        index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
        begins = starts_of_segments(segment_ids, segment_ids.shape[1])
        return jax.lax.cummax(jnp.where(begins, index, 0), axis=1)

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
        kernel = self.kernel or ("mosaic_gpu" if _capability() == HOPPER else "triton")
        local = functools.partial(_attend, kernel=kernel, scale=scale, softcap=softcap, window=window)
        return per_device(local, query, key, value, segments)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    first: Array | None,
    *,
    kernel: str,
    scale: float,
    softcap: float | None,
    window: Window,
) -> Array:
    from tokamax._src.ops.attention.api import IMPLEMENTATIONS
    from tokamax._src.ops.attention.base import Mask

    first = jnp.zeros(query.shape[:2], jnp.int32) if first is None else first
    if window is not None:
        first = jnp.maximum(first, jnp.arange(query.shape[1], dtype=jnp.int32) - window + 1)
    return IMPLEMENTATIONS[kernel](
        query,
        key,
        value,
        bias=None,
        mask=Mask(k_start=first[:, None], is_causal=True),
        logits_scale=scale,
        logits_soft_cap=softcap,
        precision=None,
    )


def _capability() -> tuple[int, ...]:
    major, minor = jax.devices()[0].compute_capability.split(".")
    return int(major), int(minor)


def _version() -> str | None:
    try:
        return importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return None
