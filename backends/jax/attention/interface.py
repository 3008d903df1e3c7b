"""Interface of attention implementations: callables on packed rows that say beforehand what they
can't do.

    bounds(segment ids)           once per micro-batch, on the host: static in the compiled program
    segments(segment ids, bounds) once per program, on the device: what each kernel is told
    attention(q, k, v, segments)  in each layer

All implementations compute what `xla` does (tests/unit/backends/jax/attention holds them to it):

.. math:: \\mathrm{softmax}_s(c \\tanh(q_t \\cdot k_s\\,\\mathrm{scale} / c))\\, v_s,
    \\quad t - \\mathrm{window} < s \\le t

with s in the segment of t. What they give where the segment id is 0, padding, is finite and
otherwise undefined.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from rljax.backends.jax.sharding import ACTIVATIONS, AXES, fit

Window = Array | int | None  # keys that a query sees, itself included; may be traced; None: all


@dataclasses.dataclass(frozen=True)
class Problem:
    """Fixed facts about the attention of a model on a device, by which an implementation says
    whether it can do it.
    """

    platform: str  # "cpu", "gpu", "tpu"
    capability: tuple[int, int] | None  # of an NVIDIA GPU: (9, 0) is Hopper
    dtype: str
    head_dim: int
    softcap: float | None
    windows: tuple[int | None, ...]  # those that occur in the layers, each once; None where one hides nothing of a row


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Bounds:
    """Upper bounds on length and number of the segments of a micro-batch.

    A new value is a new compilation, so they are coarse.

    Example: Bounds(longest=1024, starts=4) fits rows of 4096 tokens with segments of 300 and 1000.
    """

    longest: int  # tokens of a segment; divides the length of the rows
    starts: int  # segments, and stretches of padding, that begin in any of the row's blocks of `longest` tokens


class Attention(Protocol):
    """An implementation. Hashable, for it is static in compiled programs."""

    @property
    def name(self) -> str:
        """Name in `jax.attention`."""

    def refusal(self, problem: Problem) -> str | None:
        """Why it can't do it, in a few words; None where it can."""

    def bounds(self, segment_ids: np.ndarray) -> Bounds | None:
        """Returns what `segments` needs to know beforehand about rows [B, T]; None if nothing."""

    def segments(self, segment_ids: Array, bounds: Bounds | None) -> Any:
        """Segment ids [B, T] as the kernel takes them: arrays whose first axis is split over
        devices as rows are.
        """

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        scale: float,
        softcap: float | None = None,
        segments: Any = None,
        window: Window = None,
        windows: tuple[int | None, ...] = (None,),
    ) -> Array:
        """Attends along the rows.

        Args:
          query: [B, T, N, D], N a multiple of K.
          key, value: [B, T, K, D].
          softcap: c; None for no cap.
          segments: from `segments`; None: a row is one segment.
          window: of this layer, one of `windows` where it is traced.
          windows: static, those that occur in the model; None among them is all keys.

        Returns:
          [B, T, N, D] in the dtype of value.
        """


def by_window(attend: Callable[[int | None], Array], window: Window, windows: Sequence[int | None], longest: int) -> Array:
    """Calls `attend` with a window that is static: the branch of those in the model that this
    layer's traced one names.

    A window no shorter than the longest segment hides nothing, so that branches are only for
    shorter ones.
    """
    if window is None or isinstance(window, int):
        return attend(None if window is None or window >= longest else window)
    short = sorted(size for size in windows if size is not None and size < longest)
    if not short:
        return attend(None)
    branches = [functools.partial(attend, size) for size in short]
    if len(short) == len(windows):
        return jax.lax.switch(jnp.searchsorted(jnp.asarray(short), window), branches)
    return jax.lax.switch(jnp.searchsorted(jnp.asarray(short), window), [*branches, functools.partial(attend, None)])


def per_device(attend: Callable[..., Array], query: Array, key: Array, value: Array, segments: Any) -> Array:
    """Calls attend(query, key, value, segments) on each device's rows and heads: XLA can't
    partition a kernel.

    Keys and values are repeated for the query heads where the tensor axis divides those alone.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or mesh.size == 1 or not set(AXES) <= set(mesh.axis_names):
        return attend(query, key, value, segments)
    if key.shape[2] % mesh.shape["tensor"]:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    heads = fit(ACTIVATIONS["heads"], query.shape, mesh.shape)
    rows = PartitionSpec(heads[0])
    return jax.shard_map(attend, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)(
        query, key, value, segments
    )


def starts_of_segments(segment_ids: Any, longest: int, xp: Any = jnp) -> Any:
    """Marks tokens at which a segment or a stretch of padding begins: [B, T] bool.

    Padding is cut into stretches of `longest` at most.

    Args:
      xp: numpy or jax.numpy, as segment_ids are.
    """
    first = xp.ones_like(segment_ids[:, :1], dtype=bool)
    begins = xp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    index = xp.arange(segment_ids.shape[1])
    return begins | ((segment_ids == 0) & (index % longest == 0))
