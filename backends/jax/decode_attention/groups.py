"""Rows whose tables begin with the same pages, such as the samples of one prompt: found on the
host, so that attention reads those pages once for all of them.

Attention over a row is the sum of its parts, each scaled by its share of the softmax's denominator,
so the shared pages can be seen by the queries of many rows at once and the rest by each row alone
(Hydragen: Juravsky et al. 2024, arXiv:2402.05099).

    items   parts of shared prefixes, each for at most MEMBERS rows: their queries are stacked
    own     every row, from where its items end
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

MEMBERS = 16  # rows that an item is for
SPLIT = 8  # pages of an item: a long prefix keeps several processors busy
PARTS = 4  # items of a prefix at most
HEAD = 3  # columns of an item before its members


class Groups(NamedTuple):
    """Arrays of int32, of jax or numpy; shapes depend on the number of rows alone."""

    items: Any  # [W, HEAD + MEMBERS]: row whose table names the pages, first page, one past the last (0: unused), rows or -1
    own: Any  # [R, 4]: pages that items see for the row, its first item, how many, and its place among their members


def capacity(rows: int) -> int:
    """Items that there is room for; what does not fit is read by each row for itself."""
    return max(rows // 2, 1)


def no_groups(rows: int) -> Groups:
    items = np.full((capacity(rows), HEAD + MEMBERS), -1, np.int32)
    items[:, :HEAD] = 0
    return Groups(items, np.zeros((rows, 4), np.int32))


def find_groups(tables: np.ndarray, pages: int, rows: np.ndarray, split: int = SPLIT) -> Groups:
    """Groups rows by the longest run of leading pages that each shares with another.

    Args:
      tables: [B, C] int32; out of range: no page.
      pages: in the pool.
      rows: those of the tables that take part, int.
      split: pages of an item, or more where items or PARTS would not suffice.
    """
    found = no_groups(len(tables))
    own = tables[rows]
    there = own < pages
    holders = np.bincount(own[there], minlength=pages + 1)
    shared = np.cumprod(there & (holders[np.minimum(own, pages)] > 1), axis=1).sum(axis=1)
    common = np.flatnonzero(shared)
    keys, of_key = np.unique(own[common, shared[common] - 1], return_inverse=True)
    groups = [(rows[common[of_key == key]], int(shared[common[of_key == key][0]])) for key in range(len(keys))]
    groups = sorted((g for g in groups if len(g[0]) > 1), key=_saved, reverse=True)
    room = len(found.items)
    split = max(split, -(-max((length for _, length in groups), default=0) // PARTS))
    while split < tables.shape[1] and sum(_count(*group, split) for group in groups) > room:
        split *= 2
    item = 0
    for members, length in groups:
        if item + _count(members, length, split) > room:
            continue
        parts = -(-length // split)
        for start in range(0, len(members), MEMBERS):
            some = members[start : start + MEMBERS]
            found.own[some, :3] = length, item, parts
            found.own[some, 3] = np.arange(len(some))
            for first in range(0, length, split):
                found.items[item, :HEAD] = some[0], first, min(first + split, length)
                found.items[item, HEAD : HEAD + len(some)] = some
                item += 1
    return found


def _count(members: np.ndarray, length: int, split: int) -> int:
    """Items of a group."""
    return -(-len(members) // MEMBERS) * -(-length // split)


def _saved(group: tuple[np.ndarray, int]) -> int:
    """Pages that need not be read."""
    members, length = group
    return (len(members) - -(-len(members) // MEMBERS)) * length
