"""Micro-batches on the mesh, cut from a numpy batch: few shapes, so few compilations."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.backends.jax.attention.interface import Attention, Bounds
from rljax.backends.jax.mesh import row_shards, rows_sharding
from rljax.backends.jax.multihost import Place, put
from rljax.batching.batch import Batch
from rljax.batching.compaction import Compacted, bucket, compact
from rljax.engines.jax.tuning import padded_length
from rljax.objective.spec import TokenArrays


class Rows(NamedTuple):
    """One micro-batch: r rows of T tokens, of which the m slots of each row that are trained on,
    or scored, are named.
    """

    token_ids: Any  # [r, T] int32
    positions: Any  # [r, T] int32
    segment_ids: Any  # [r, T] int32
    source: Any  # [r, m] int32: whose hidden state predicts the token (its index - 1)
    labels: Any  # [r, m] int32: the token
    tokens: TokenArrays  # [r, m]
    values: Any = None  # [r, m] float32, reward units; only for the critic
    returns: Any = None  # [r, m] float32, reward units; only for the critic
    anchor: Any = None  # [r, m] float32, nats: what the log-probs are; only in the bitwise mode
    bounds: Bounds | None = None  # of the segments; static, no array


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """A batch cut along its rows, all parts of one shape."""

    parts: list[Rows]  # on the mesh, rows over its data and fsdp axes
    compacted: Compacted  # of all rows, padding rows included
    shape: tuple[int, int]  # of the batch: R, T

    def scatter(self, outputs: list[np.ndarray]) -> np.ndarray:
        """[r, m] of every part -> [R, T] float32 at the tokens' parts, 0 elsewhere."""
        rows, length = self.shape
        return self.compacted.scatter(np.concatenate(outputs).astype(np.float32))[:rows, :length]


def micro_batches(
    batch: Batch,
    keep: np.ndarray,
    mesh: Mesh,
    rows_per_shard: int,
    attention: Attention,
    *,
    anchor: np.ndarray | None = None,
    place: Place = put,
) -> MicroBatches:
    """Pads rows to a whole number of micro-batches, T to a bucket, compacts the kept tokens and
    parts everything.

    Args:
      keep: [R, T] bool, the tokens that log-probs (or values) are wanted of.
      rows_per_shard: rows of a micro-batch that one shard of the data and fsdp axes takes.
      attention: what the rows will go through.
      anchor: [R, T] float32, log-probs of a bitwise score pass.
      place: `describe` where nothing but shapes is wanted.
    """
    rows, length = batch.shape
    size = rows_per_shard * row_shards(mesh)
    extra = ((0, -rows % size if rows else size), (0, padded_length(length, mesh) - length))
    batch = batch.replace(**{name: np.pad(a, extra) for name, a in vars(batch).items() if a is not None})
    keep = np.pad(keep, extra)
    compacted = compact(batch, keep, _width(keep, mesh))

    def named(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.take_along_axis(array, compacted.source + 1, axis=1)

    whole = Rows(
        batch.token_ids,
        batch.positions,
        batch.segment_ids,
        compacted.source,
        compacted.labels,
        compacted.tokens,
        named(batch.values),
        named(batch.returns),
        None if anchor is None else named(np.pad(anchor, extra)),
        attention.bounds(batch.segment_ids),
    )
    parts = [jax.tree.map(lambda a, s=start: a[s : s + size], whole) for start in range(0, len(keep), size)]
    return MicroBatches(place(parts, rows_sharding(mesh)), compacted, (rows, length))


def _width(keep: np.ndarray, mesh: Mesh) -> int:
    """m of the fullest row: a bucket, and a multiple of the tensor axis, which splits the slots."""
    width = bucket(int(keep.sum(axis=1).max(initial=0)), keep.shape[1])
    return -(-width // mesh.shape["tensor"]) * mesh.shape["tensor"]


def one_a_row(batch: Batch) -> tuple[list[np.ndarray], list[tuple[int, int, int]]]:
    """The token ids of every segment, and where it is: (row, first index, one past the last)."""
    parts = []
    for row, ids in enumerate(batch.segment_ids):
        for segment in range(1, int(ids.max(initial=0)) + 1):
            where = np.flatnonzero(ids == segment)
            parts.append((row, int(where[0]), int(where[-1]) + 1))
    return [batch.token_ids[row, start:stop] for row, start, stop in parts], parts
