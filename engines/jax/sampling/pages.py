"""The pool of pages of one shard of the sampler's cache, and the index of the tokens in them.

Pages are counted by reference: rows that begin with the same tokens hold the same pages. A page
that nobody holds stays in the index until its place is needed, least recently used first, so that
the next turn of a conversation finds its prefix.

The index is a tree. A page stands under the page before it in its row, so that it is found by all
tokens up to its last: by its own in a dict where it is whole, among the pages under the same parent
where it is not. Host side only: numpy, no device.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np

ROOT = -1  # parent of a row's first page


class Match(NamedTuple):
    """Result of a search of the index for the longest prefix of some tokens."""

    pages: list[int]  # whole pages, from the first token on
    partial: int | None  # the page that begins with most of the tokens after them
    common: int  # how many those are


class PagePool:
    """References, contents and index of P pages.

    A page is `known` up to the tokens that it has or will have, and `filled` up to those whose
    keys and values are there. What is known and not filled is filled by the oldest request that
    holds it.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size = pages, page_size
        self.filled = [0] * pages  # tokens
        self._tokens = np.zeros((pages, page_size), np.int32)
        self._known = np.zeros(pages, np.int32)  # tokens
        self._references = [0] * pages
        self._parent: list[int | None] = [None] * pages  # None: not in the index
        self._children: collections.defaultdict[int, dict[int, None]] = collections.defaultdict(dict)
        self._whole: dict[tuple[int, bytes], int] = {}  # (parent, tokens) -> page
        self._free = list(range(pages - 1, -1, -1))
        self._idle: dict[int, None] = {}  # in the index and held by nobody, least recently used first

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """Gives out an empty page with one reference; there must be one `available`."""
        if not self._free:
            self._remove(next(iter(self._idle)))
        page = self._free.pop()
        self._references[page], self._known[page], self.filled[page] = 1, 0, 0
        return page

    def hold(self, page: int) -> None:
        self._references[page] += 1
        self._idle.pop(page, None)

    def drop(self, page: int) -> None:
        """Gives up one reference; the last one leaves the page to be found, if anything is in it."""
        self._references[page] -= 1
        if self._references[page]:
            return
        self._idle[page] = None
        if self._parent[page] is None or not self.filled[page]:
            self._remove(page)  # nobody could find it

    def is_idle(self, page: int) -> bool:
        """Returns whether nobody holds the page."""
        return page in self._idle

    def known(self, page: int) -> int:
        return int(self._known[page])

    def learn(self, page: int, parent: int, tokens: np.ndarray) -> None:
        """The next tokens of a page behind `parent`. With the first it enters the index, if its
        parent is there and no other page is the same.
        """
        start = int(self._known[page])
        end = start + len(tokens)
        self._tokens[page, start:end], self._known[page] = tokens, end
        if start == 0 and (parent == ROOT or self._parent[parent] is not None):
            self._parent[page] = parent
            self._children[parent][page] = None
        indexed = self._parent[page] is not None
        if indexed and end == self.page_size and self._whole.setdefault(self._key(page), page) != page:
            self._unlink(page)

    def find(self, tokens: np.ndarray) -> Match:
        """Looks up the longest prefix of some tokens, filled or going to be."""
        pages: list[int] = []
        size, node = self.page_size, ROOT
        while len(pages) * size + size <= len(tokens):
            start = len(pages) * size
            found = self._whole.get((node, tokens[start : start + size].tobytes()))
            if found is None:
                break
            pages.append(found)
            node = found
        return Match(pages, *self._most_alike(node, tokens[len(pages) * size :][:size]))

    def _most_alike(self, parent: int, wanted: np.ndarray) -> tuple[int | None, int]:
        below = np.fromiter(self._children.get(parent, ()), np.intp)
        if not len(below) or not len(wanted):
            return None, 0
        differs = self._tokens[below, : len(wanted)] != wanted
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), len(wanted))
        common = np.minimum(common, self._known[below])
        alike = below[common == common.max()]
        best = next((page for page in alike.tolist() if self.is_idle(page)), int(alike[0]))
        return (best, int(common.max())) if common.max() else (None, 0)

    def clear(self) -> None:
        """Empties the index: the weights have changed. Pages that somebody holds stay theirs."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._whole.clear()
        self._children.clear()
        self._parent = [None] * self.pages

    def _key(self, page: int) -> tuple[int, bytes]:
        parent = self._parent[page]
        assert parent is not None
        return parent, self._tokens[page].tobytes()

    def _remove(self, page: int) -> None:
        """Takes a page and what stands under it out of the index; those that nobody holds are free."""
        for child in list(self._children.get(page, ())):
            self._remove(child)
        self._unlink(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def _unlink(self, page: int) -> None:
        parent = self._parent[page]
        if parent is None:
            return
        if self._whole.get(key := self._key(page)) == page:
            del self._whole[key]
        del self._children[parent][page]
        if not self._children[parent]:
            del self._children[parent]
        self._parent[page] = None


def columns(context: int, page_size: int) -> int:
    """Pages of a row of `context` tokens."""
    return -(-context // page_size)
