"""Cuts a numpy batch into the micro-batches of this rank, equal in shape and number on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rljax.backends.torch.attention import Segments
from rljax.backends.torch.mesh import RankMesh
from rljax.backends.torch.model import Pictures
from rljax.batching.batch import Batch
from rljax.batching.compaction import Compacted, bucket, compact
from rljax.batching.packing import balance, row_costs, spread
from rljax.batching.pictures import decode_pictures
from rljax.errors import UserError
from rljax.hf.other_model import Model
from rljax.hf.tensors import parameter_count
from rljax.objective.spec import TokenArrays
from rljax.types import PROMPT_VERSION

MULTIPLE = 16  # rows are padded to a multiple of so many tokens


@dataclasses.dataclass(frozen=True)
class Rows:
    """One micro-batch: r rows of T tokens, of which the m target tokens of each row are scored.

    With context parallelism of c ranks, this rank has a slice of T / c tokens of each row, and
    scores the target tokens of r / c rows.
    """

    token_ids: Tensor  # [r, T / c] int64
    positions: Tensor  # [r, T / c] int64
    segments: Segments  # segments of the whole rows
    source: Tensor  # [r / c, m] int64: index of the hidden state that predicts the token (the token's index - 1)
    labels: Tensor  # [r / c, m] int64: the token
    tokens: TokenArrays  # [r / c, m]
    with_advantage: int  # target tokens whose advantage is not 0, known before the device is asked
    values: Tensor | None = None  # [r / c, m] float32, reward units; only for the critic
    returns: Tensor | None = None  # [r / c, m] float32, reward units; only for the critic
    pictures: Pictures | None = None  # None: text alone


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """This rank's share of a batch, cut along its rows."""

    batch: Batch  # this rank's rows, and padding
    compacted: Compacted  # target tokens of the same rows
    row_index: np.ndarray  # [rows] int64: index of each row in the whole batch; -1 for padding
    size: int  # rows of a micro-batch
    shape: tuple[int, int]  # (R, T) of the whole batch
    rank_mesh: RankMesh
    spread: float  # (largest cost of a rank - mean cost) / mean cost
    picture_token: int | None = None  # stands for a part of a picture; None: the model takes text alone

    def __iter__(self) -> Iterator[Rows]:
        """Yields micro-batches, each moved to the device when it is asked for."""
        for start in range(0, len(self.row_index), self.size):
            yield self._rows(slice(start, start + self.size))

    def _rows(self, part: slice) -> Rows:
        context, batch = self.rank_mesh.context, self.batch
        own = context.slice(batch.shape[1])
        share = context.slice(self.size)
        scored = slice(part.start + share.start, part.start + share.stop)
        at_targets, targets = self._at_targets, self.compacted.tokens
        return Rows(
            self._to_device(batch.token_ids[part, own]).long(),
            self._to_device(batch.positions[part, own]).long(),
            Segments.of(batch.segment_ids[part], self.rank_mesh.device, context),
            self._to_device(self.compacted.source[scored]).long(),
            self._to_device(self.compacted.labels[scored]).long(),
            TokenArrays(*(None if a is None else self._to_device(a[scored]) for a in targets)),
            int((targets.mask[scored] & (targets.advantage[scored] != 0)).sum()),
            at_targets(batch.values, scored),
            at_targets(batch.returns, scored),
            self._pictures(part),
        )

    def _pictures(self, rows: slice) -> Pictures | None:
        if self.batch.pictures is None or self.picture_token is None:
            return None
        urls = tuple(url for row in decode_pictures(self.batch.pictures[rows]) for url in row)
        # The policy may sample the token too; then it is a token as any other
        at = (self.batch.token_ids[rows] == self.picture_token) & (self.batch.versions[rows] == PROMPT_VERSION)
        return Pictures(urls, self._to_device(at)) if urls else None

    def _at_targets(self, array: np.ndarray | None, rows: slice) -> Tensor | None:
        if array is None:
            return None
        return self._to_device(np.take_along_axis(array[rows], self.compacted.source[rows] + 1, axis=1))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.rank_mesh.device, non_blocking=True)

    def scatter(self, outputs: list[Tensor]) -> np.ndarray:
        """Puts the outputs of all micro-batches, [r / c, m] each, back at their tokens.

        Returns [R, T] float32, 0 elsewhere; the whole array on every rank.
        """
        context, rank_mesh = self.rank_mesh.context, self.rank_mesh
        rows, length = self.shape
        whole = torch.zeros((rows, length), dtype=torch.float32, device=rank_mesh.device)
        if rank_mesh.is_primary:
            share = context.slice(self.size)
            mine = [
                row
                for start in range(0, len(self.row_index), self.size)
                for row in range(start + share.start, start + share.stop)
            ]
            scored = self._scattered(torch.cat(outputs).float().cpu().numpy(), np.array(mine))
            real = self.row_index[mine] >= 0
            whole[torch.from_numpy(self.row_index[mine][real]).to(rank_mesh.device)] = self._to_device(scored[real, :length])
        return rank_mesh.reduce(whole).cpu().numpy()

    def _scattered(self, values: np.ndarray, rows: np.ndarray) -> np.ndarray:
        tokens = self.compacted.tokens
        part = Compacted(
            self.compacted.source[rows],
            self.compacted.labels[rows],
            tokens._replace(mask=tokens.mask[rows]),
            self.batch.shape[1],
        )
        return part.scatter(values)


def micro_batches(
    batch: Batch,
    keep: np.ndarray,
    rank_mesh: RankMesh,
    spec: Model,
    rows_per_mb: int,
    picture_token: int | None = None,
) -> MicroBatches:
    """Divides rows among ranks at about equal cost, padded to whole micro-batches of one shape.

    Args:
      keep: [R, T] bool, the tokens whose log-probs (or values) are wanted.
      rows_per_mb: rows per micro-batch and rank (with context parallelism: per context group);
        rounded up to a multiple of the group's size.
      picture_token: id that stands for a part of a picture, of a model that takes pictures.

    Raises UserError for pictures that the model doesn't take.
    """
    if batch.pictures is not None and picture_token is None:
        raise UserError("pictures: the prompts have some, and the learner's model takes text alone (docs/vision.md)")
    rows, length = batch.shape
    context = rank_mesh.context.size
    size = -(-rows_per_mb // context) * context
    part, parts = rank_mesh.data_shard
    costs = _costs(batch, spec)
    shares = balance(costs, parts)
    count = max(1, *(-(-len(share) // size) for share in shares))
    row_index = np.full(count * size, -1, np.int64)
    row_index[: len(shares[part])] = shares[part]
    multiple = MULTIPLE * context
    padded = -(-length // multiple) * multiple
    width = bucket(int(keep.sum(axis=1).max(initial=0)), padded)

    def mine(array: Any) -> np.ndarray:
        out = np.zeros((len(row_index), padded), array.dtype)
        out[: len(shares[part]), :length] = array[shares[part]]
        return out

    own = batch.replace(**{name: mine(a) for name, a in vars(batch).items() if a is not None and name != "pictures"})
    if batch.pictures is not None:
        padding = ((0, len(row_index) - len(shares[part])), (0, 0))
        own = own.replace(pictures=np.pad(batch.pictures[shares[part]], padding))
    cut = compact(own, mine(keep), width)
    return MicroBatches(own, cut, row_index, size, (rows, length), rank_mesh, spread(costs, shares), picture_token)


def _costs(batch: Batch, spec: Model) -> np.ndarray:
    """Returns the cost of each row: its tokens, and its attention beside the matrix products.

    [R] float64, in tokens.
    """
    ratio = spec.num_layers * spec.num_heads * spec.head_dim / parameter_count(spec)  # 2 A L^2 of 2 P L operations
    return 1 + row_costs(batch.segment_ids, 1.0, ratio)
