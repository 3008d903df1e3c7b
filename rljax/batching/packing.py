"""Packing: assigns trajectories to rows, and rows to ranks. numpy only.

A row holds whole trajectories one after the other, told apart by segment ids. Rows are as few as
first-fit-decreasing makes them, and as long as the smallest of a few buckets, so that a compiled
learner sees few shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rljax.batching.batch import Batch
from rljax.batching.pictures import encode_pictures
from rljax.errors import UserError
from rljax.types import Trajectory

ROW_BUCKETS = 4  # row lengths a learner may see: capacity, capacity / 2, capacity / 4, capacity / 8
EXACT_BELOW = 16384  # trajectories; above it lengths are rounded up so that a row has at most
DISTINCT_LENGTHS = 4096  # to 8191 of them, which costs 0.02% of a row and keeps the time of packing flat


@dataclasses.dataclass(frozen=True)
class Packing:
    """Assignment of N trajectories to R rows of T tokens.

    Example: packing = pack([3, 5, 2], 8); packing.gather(packing.scatter(arrays, dtype)) gives the
    arrays back
    """

    row: np.ndarray  # [N] int32
    offset: np.ndarray  # [N] int32, tokens
    length: np.ndarray  # [N] int32, tokens
    shape: tuple[int, int]  # R, T

    def flat_index(self) -> np.ndarray:
        """Returns the index of each token of each trajectory, in order, in a raveled [R, T] array.

        [sum(length)] int64.
        """
        start = self.row.astype(np.int64) * self.shape[1] + self.offset
        first = np.cumsum(self.length) - self.length
        return np.repeat(start - first, self.length) + np.arange(int(self.length.sum()))

    def scatter(self, arrays: Sequence[np.ndarray], dtype: np.dtype | type) -> np.ndarray:
        """Copies an array of `length` entries per trajectory into rows: [R, T], zero on padding."""
        rows = np.zeros(self.shape[0] * self.shape[1], dtype)
        if arrays:
            rows[self.flat_index()] = np.concatenate(arrays)
        return rows.reshape(self.shape)

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the entries of each trajectory from rows [R, T]; the inverse of `scatter`."""
        flat = rows.reshape(-1)[self.flat_index()]
        return np.split(flat, np.cumsum(self.length)[:-1]) if len(self.length) else []

    def segment_ids(self) -> np.ndarray:
        """Returns [R, T] int32: 0 on padding, 1, 2, ... along a row."""
        order = np.lexsort((self.offset, self.row))
        first = np.searchsorted(self.row[order], np.arange(self.shape[0]))  # of each row, in `order`
        segment = np.empty(len(order), np.int32)
        segment[order] = np.arange(len(order)) - first[self.row[order]] + 1
        return self.scatter([np.repeat(segment, self.length)], np.int32)

    def positions(self) -> np.ndarray:
        """Returns [R, T] int32: 0, 1, ... within a segment; 0 on padding."""
        first = np.cumsum(self.length) - self.length
        return self.scatter([np.arange(int(self.length.sum())) - np.repeat(first, self.length)], np.int32)


def pack(lengths: Sequence[int] | np.ndarray, row_tokens: int) -> Packing:
    """Packs trajectories by first-fit-decreasing into as few rows as that needs.

    First-fit-decreasing fills row after row with the longest trajectory that still fits. Here a
    row's filling is worked out once and repeated as long as enough trajectories of each of its
    lengths are left, so the work in Python grows with the number of distinct lengths, not with N:
    100k lengths take tens of milliseconds.

    Args:
      lengths: [N], tokens of each trajectory, 1 to row_tokens.
      row_tokens: T, tokens of a row.

    Raises:
      ValueError: a length outside [1, row_tokens].
    """
    lengths = np.asarray(lengths, np.int64)
    if lengths.size == 0:
        nothing = np.zeros(0, np.int32)
        return Packing(nothing, nothing, nothing, (0, row_tokens))
    if lengths.min() < 1 or lengths.max() > row_tokens:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit rows of {row_tokens} tokens")
    unit = max(1, row_tokens // DISTINCT_LENGTHS) if len(lengths) > EXACT_BELOW else 1
    units = np.minimum(-(-lengths // unit), row_tokens // unit)  # rounded up; a length cut by the minimum fills a row alone
    fills, rows = _fill_rows(np.bincount(units, minlength=row_tokens // unit + 1).tolist(), row_tokens // unit)
    # Fills of one length, in the order they were made, take its trajectories in order.
    length, each, repeats, first_row, offset = fills[:, np.argsort(fills[0], kind="stable")]
    taken = each * repeats
    index = np.arange(len(lengths)) - np.repeat(np.cumsum(taken) - taken, taken)
    row_of, nth = np.divmod(index.astype(np.int32), np.repeat(each.astype(np.int32), taken))
    order = np.argsort(_narrow(units), kind="stable")
    row, start = np.empty(len(lengths), np.int32), np.empty(len(lengths), np.int32)
    row[order] = np.repeat(first_row, taken) + row_of
    start[order] = np.repeat(offset, taken) + nth * np.repeat(length, taken)
    if unit > 1:
        start = _close_gaps(row, start, lengths)
    return Packing(row, start, lengths.astype(np.int32), (rows, row_tokens))


def _close_gaps(row: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns offsets without the gaps left by rounding lengths up, [N] int32.

    Trajectories keep their order in the row.
    """
    order = np.argsort(row.astype(np.int64) * (int(start.max()) + 1) + start)
    in_order = lengths[order]
    before = np.cumsum(in_order) - in_order
    count = np.bincount(row)
    closed = np.empty(len(lengths), np.int32)
    closed[order] = before - np.repeat(before[np.cumsum(count) - count], count)
    return closed


def _fill_rows(left: list[int], row_tokens: int) -> tuple[np.ndarray, int]:
    """Runs first-fit-decreasing over left[length] trajectories of each length.

    Returns:
      Fills [5, F] int64: length, number of trajectories of it per row, number of rows filled alike,
      the first of these rows, offset in the row; and the number of rows.
    """
    below = list(range(row_tokens + 1))  # union-find: the longest length at most i that is left; 0 is none
    for i in range(1, row_tokens + 1):
        if not left[i]:
            below[i] = below[i - 1]
    fills: list[tuple[int, int, int, int, int]] = []
    row = 0
    while longest := _find(below, row_tokens):
        room, length, repeats, start = row_tokens, longest, left[longest], len(fills)
        while length:
            each = min(left[length], room // length)
            repeats = min(repeats, left[length] // each)
            fills.append((length, each, 0, row, row_tokens - room))
            room -= each * length
            length = _find(below, min(room, length - 1))
        for i in range(start, len(fills)):
            length, each, _, _, offset = fills[i]
            fills[i] = (length, each, repeats, row, offset)
            left[length] -= each * repeats
            if not left[length]:
                below[length] = length - 1
        row += repeats
    return np.array(fills, np.int64).T, row


def _find(parent: list[int], i: int) -> int:
    """Returns the root of i, halving the path."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


def _narrow(lengths: np.ndarray) -> np.ndarray:
    """Converts to 16 bits where possible: such integers are sorted by radix, ten times as fast."""
    return lengths.astype(np.uint16) if lengths.max() < 2**16 else lengths


def row_tokens_for(lengths: Sequence[int] | np.ndarray, max_tokens_per_row: int, rows_per_mb: int = 1) -> int:
    """Returns the row length in tokens: the smallest bucket that is enough, else the largest.

    A bucket is enough if its rows hold the longest trajectory, and one micro-batch holds all rows.

    Raises:
      UserError: a trajectory is longer than a row may be.
    """
    lengths = np.asarray(lengths)
    longest, total = int(lengths.max(initial=1)), int(lengths.sum())
    if longest > max_tokens_per_row:
        raise UserError(
            f"actor.mb_spec.max_tokens_per_row: a trajectory has {longest} tokens, a row holds {max_tokens_per_row}"
            f" (raise it to {longest}, or lower gconfig.max_new_tokens or train_dataset.max_length)"
        )
    for power in range(ROW_BUCKETS - 1, 0, -1):
        bucket = max_tokens_per_row >> power
        fits = longest <= bucket and total <= bucket * rows_per_mb
        if fits and pack(lengths, bucket).shape[0] <= rows_per_mb:
            return bucket
    return max_tokens_per_row


def cost(lengths: np.ndarray, linear: float, quadratic: float) -> np.ndarray:
    """Estimates a learner's work per trajectory of L tokens: a L + b L^2. [N] float64.

    Matmuls are linear in the length, attention is quadratic.
    """
    lengths = np.asarray(lengths, np.float64)
    return linear * lengths + quadratic * lengths**2


def row_costs(segment_ids: np.ndarray, linear: float = 1.0, quadratic: float = 0.0) -> np.ndarray:
    """Adds up the `cost` of the segments of each row. segment_ids [R, T] -> [R] float64."""
    rows = len(segment_ids)
    width = int(segment_ids.max(initial=0)) + 1
    flat = (np.arange(rows)[:, None] * width + segment_ids).ravel()
    lengths = np.bincount(flat, minlength=rows * width).reshape(rows, width)[:, 1:]  # segment 0 is padding
    return cost(lengths, linear, quadratic).sum(axis=1)


RANK_SPREAD = "timeperf/rank_spread"  # metric of an update over several ranks: `spread` of their shares


def spread(costs: np.ndarray, parts: Sequence[np.ndarray]) -> float:
    """Returns the cost of the most expensive part over the mean, minus 1.

    It is the share of time that the other parts wait for it.
    """
    totals = np.array([costs[part].sum() for part in parts])
    return float(totals.max() / totals.mean() - 1) if totals.any() else 0.0


def balance(costs: np.ndarray, parts: int, *, equal_counts: bool = False) -> list[np.ndarray]:
    """Splits N items over ranks (or minibatches) so that the parts cost about the same.

    Longest-processing-time-first, in rounds of `parts` items so that counts differ by one at most,
    then the most expensive and the cheapest part trade items while that narrows their gap. With
    thousands of items the parts agree within 1%; with few they are as even as the items allow.

    Args:
      costs: [N] float64, positive.
      equal_counts: only swap items, never move one: counts stay within one of each other.

    Returns:
      For each part the indices of its items, ascending.
    """
    costs = np.asarray(costs, np.float64)
    order = np.argsort(-costs, kind="stable")
    totals = np.zeros(parts)
    members: list[list[int]] = [[] for _ in range(parts)]
    for start in range(0, len(order), parts):
        round_of = order[start : start + parts]
        for item, part in zip(round_of.tolist(), np.argsort(totals, kind="stable").tolist(), strict=False):
            members[part].append(item)
            totals[part] += costs[item]
    for _ in range(8 * parts):
        if not _trade(costs, members, totals, equal_counts):
            break
    return [np.sort(np.array(m, np.int64)) for m in members]


def _trade(costs: np.ndarray, members: list[list[int]], totals: np.ndarray, equal_counts: bool) -> bool:
    """Swaps (or moves) one item between the most expensive and the cheapest part.

    Returns False if nothing narrows the gap.
    """
    highest, lowest = int(totals.argmax()), int(totals.argmin())
    gap = totals[highest] - totals[lowest]
    if gap <= 1e-4 * totals.mean() or not members[highest]:
        return False
    ours = np.array(members[highest])
    theirs = np.array([*members[lowest], -1]) if not equal_counts else np.array(members[lowest], np.int64)
    if not len(theirs):
        return False
    their_costs = np.where(theirs < 0, 0.0, costs[theirs])  # -1: a move without a return
    by_cost = np.argsort(their_costs, kind="stable")
    # The best partner of each of ours is next to (its cost - gap / 2) among theirs.
    near = np.searchsorted(their_costs[by_cost], costs[ours] - gap / 2)
    candidates = np.stack([np.clip(near - 1, 0, len(by_cost) - 1), np.clip(near, 0, len(by_cost) - 1)], 1)
    shift = costs[ours][:, None] - their_costs[by_cost][candidates]
    left_over = np.where((shift > 0) & (shift < gap), np.abs(gap - 2 * shift), np.inf)
    i, j = np.unravel_index(int(left_over.argmin()), left_over.shape)
    if not left_over[i, j] < gap * (1 - 1e-9):
        return False
    mine, other = int(ours[i]), int(theirs[by_cost][candidates[i, j]])
    members[highest].remove(mine)
    members[lowest].append(mine)
    if other >= 0:
        members[lowest].remove(other)
        members[highest].append(other)
    totals[highest] -= shift[i, j]
    totals[lowest] += shift[i, j]
    return True


def batch_of(
    trajectories: Sequence[Trajectory],
    packing: Packing,
    *,
    loss_mask: Sequence[np.ndarray] | None = None,
    loss_weight: Sequence[np.ndarray] | None = None,
    advantage: Sequence[np.ndarray] | None = None,
    proximal_logp: Sequence[np.ndarray] | None = None,
    reference_logp: Sequence[np.ndarray] | None = None,
    teacher_logp: Sequence[np.ndarray] | None = None,
    interpolation: Sequence[np.ndarray] | None = None,
    values: Sequence[np.ndarray] | None = None,
    returns: Sequence[np.ndarray] | None = None,
) -> Batch:
    """Copies trajectories and their per-token arrays into packed rows.

    Args:
      trajectories: N of them, in the order of the packing.
      loss_mask: N arrays [T] bool; None: the trajectories' own. Weights outside it are dropped.
      loss_weight, advantage: N arrays [T] float32; None: zeros (a batch that is only scored).
      proximal_logp, reference_logp, teacher_logp, interpolation, values, returns: N arrays [T]
        float32, or None where the batch has none.
    """
    masks = list(loss_mask) if loss_mask is not None else [t.loss_mask for t in trajectories]

    def floats(arrays: Sequence[np.ndarray] | None) -> np.ndarray | None:
        return None if arrays is None else packing.scatter(arrays, np.float32)

    mask = packing.scatter(masks, bool)
    weight, adv = floats(loss_weight), floats(advantage)
    zeros = np.zeros(packing.shape, np.float32)
    return Batch(
        token_ids=packing.scatter([t.token_ids for t in trajectories], np.int32),
        segment_ids=packing.segment_ids(),
        positions=packing.positions(),
        loss_mask=mask,
        loss_weight=zeros if weight is None else np.where(mask, weight, np.float32(0)),
        behavior_logp=packing.scatter([t.behavior_logp for t in trajectories], np.float32),
        versions=packing.scatter([t.versions for t in trajectories], np.int32),
        advantage=zeros if adv is None else adv,
        proximal_logp=floats(proximal_logp),
        reference_logp=floats(reference_logp),
        teacher_logp=floats(teacher_logp),
        interpolation=floats(interpolation),
        values=floats(values),
        returns=floats(returns),
        pictures=_pictures(trajectories, packing),
    )


def _pictures(trajectories: Sequence[Trajectory], packing: Packing) -> np.ndarray | None:
    """Encodes the pictures of each row in the order of its trajectories; None if there are none."""
    if not any(t.pictures for t in trajectories):
        return None
    rows: list[list[str]] = [[] for _ in range(packing.shape[0])]
    for i in np.argsort(packing.offset, kind="stable").tolist():
        rows[packing.row[i]] += trajectories[i].pictures
    return encode_pictures(rows)
