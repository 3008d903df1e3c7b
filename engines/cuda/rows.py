"""From a numpy batch to the micro-batches of this rank, of one shape and as many on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rljax.backends.torch.attention import Segments
from rljax.backends.torch.mesh import Layout
from rljax.batching.batch import Batch
from rljax.batching.compaction import Compacted, bucket, compact
from rljax.batching.packing import balance, row_costs, spread
from rljax.hf.spec import ModelSpec
from rljax.hf.tensors import parameter_count
from rljax.objective.spec import TokenArrays

MULTIPLE = 16  # tokens; rows are padded to one


@dataclasses.dataclass(frozen=True)
class Rows:
    """One micro-batch: r rows of T tokens, of which the m slots of each row that are trained on,
    or scored, are named.

    With context parallelism this rank has a slice of T / c tokens of each row, and scores the
    named slots of r / c rows.
    """

    token_ids: Tensor  # [r, T / c] int64
    positions: Tensor  # [r, T / c] int64
    segments: Segments  # of the whole rows
    source: Tensor  # [r / c, m] int64: whose hidden state predicts the token (its index - 1)
    labels: Tensor  # [r / c, m] int64: the token
    tokens: TokenArrays  # [r / c, m]
    values: Tensor | None = None  # [r / c, m] float32, reward units; only for the critic
    returns: Tensor | None = None  # [r / c, m] float32, reward units; only for the critic


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """This rank's share of a batch, cut along its rows."""

    batch: Batch  # its rows and padding
    compacted: Compacted  # of the same rows
    place: np.ndarray  # [rows] int64: where in the whole batch each of them is; -1 for padding
    size: int  # rows of a micro-batch
    shape: tuple[int, int]  # of the whole batch: R, T
    layout: Layout
    spread: float  # how much more than the mean the rank with the most to do has, as a share of the mean

    def __iter__(self) -> Iterator[Rows]:
        """Micro-batch after micro-batch, moved to the device as it is asked for."""
        for start in range(0, len(self.place), self.size):
            yield self._rows(slice(start, start + self.size))

    def _rows(self, part: slice) -> Rows:
        context, batch = self.layout.context, self.batch
        own = context.slice(batch.shape[1])
        share = context.slice(self.size)
        scored = slice(part.start + share.start, part.start + share.stop)
        named = self._named
        return Rows(
            self._placed(batch.token_ids[part, own]).long(),
            self._placed(batch.positions[part, own]).long(),
            Segments.of(batch.segment_ids[part], self.layout.device, context),
            self._placed(self.compacted.source[scored]).long(),
            self._placed(self.compacted.labels[scored]).long(),
            TokenArrays(*(None if a is None else self._placed(a[scored]) for a in self.compacted.tokens)),
            named(batch.values, scored),
            named(batch.returns, scored),
        )

    def _named(self, array: np.ndarray | None, rows: slice) -> Tensor | None:
        if array is None:
            return None
        return self._placed(np.take_along_axis(array[rows], self.compacted.source[rows] + 1, axis=1))

    def _placed(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.layout.device, non_blocking=True)

    def scatter(self, outputs: list[Tensor]) -> np.ndarray:
        """[r / c, m] of every micro-batch -> [R, T] float32 at the tokens' parts, 0 elsewhere;
        whole on every rank.
        """
        context, layout = self.layout.context, self.layout
        rows, length = self.shape
        whole = torch.zeros((rows, length), dtype=torch.float32, device=layout.device)
        if layout.speaks:
            share = context.slice(self.size)
            mine = [
                at for start in range(0, len(self.place), self.size) for at in range(start + share.start, start + share.stop)
            ]
            scored = self._scattered(torch.cat(outputs).float().cpu().numpy(), np.array(mine))
            real = self.place[mine] >= 0
            whole[torch.from_numpy(self.place[mine][real]).to(layout.device)] = self._placed(scored[real, :length])
        return layout.reduce(whole).cpu().numpy()

    def _scattered(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        tokens = self.compacted.tokens
        part = Compacted(
            self.compacted.source[rows],
            self.compacted.labels[rows],
            tokens._replace(mask=tokens.mask[rows]),
            self.batch.shape[1],
        )
        return part.scatter(values)


def micro_batches(batch: Batch, keep: np.ndarray, layout: Layout, spec: ModelSpec, rows_per_mb: int) -> MicroBatches:
    """Deals rows to the ranks so that all have about the same to do, and pads them to whole
    micro-batches of one shape.

    Args:
      keep: [R, T] bool, the tokens that log-probs (or values) are wanted of.
      rows_per_mb: rows of a micro-batch that a rank (with context parallelism: a context group)
        takes; rounded up to a multiple of the group's size.
    """
    rows, length = batch.shape
    context = layout.context.size
    size = -(-rows_per_mb // context) * context
    part, parts = layout.dealt
    costs = _costs(batch, spec)
    shares = balance(costs, parts)
    count = max(1, *(-(-len(share) // size) for share in shares))
    place = np.full(count * size, -1, np.int64)
    place[: len(shares[part])] = shares[part]
    multiple = MULTIPLE * context
    padded = -(-length // multiple) * multiple
    width = bucket(int(keep.sum(axis=1).max(initial=0)), padded)

    def mine(array: Any) -> np.ndarray:
        out = np.zeros((len(place), padded), array.dtype)
        out[: len(shares[part]), :length] = array[shares[part]]
        return out

    own = batch.replace(**{name: mine(a) for name, a in vars(batch).items() if a is not None})
    return MicroBatches(own, compact(own, mine(keep), width), place, size, (rows, length), layout, spread(costs, shares))


def _costs(batch: Batch, spec: ModelSpec) -> np.ndarray:
    """What each row costs: its tokens, and what attention costs beside the matrices.

    [R] float64, in tokens.
    """
    ratio = spec.num_layers * spec.num_heads * spec.head_dim / parameter_count(spec)  # 2 A L^2 of 2 P L operations
    return 1 + row_costs(batch.segment_ids, 1.0, ratio)
