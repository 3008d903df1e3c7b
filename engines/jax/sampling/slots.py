"""The slot table: the request in each slot, and the pages that hold its keys and values.

Requests whose tokens begin alike hold the same whole pages, filled once. A page that is common in
part is copied. Host side only: numpy, no device.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from rljax.backends.jax.decode_attention import Groups, find_groups
from rljax.engines.jax.sampling.pages import ROOT, PagePool, columns
from rljax.engines.jax.sampling.stop_strings import StopStrings
from rljax.types import Completion, Finish, Piece, Request

DISPATCH = 64  # what a prefill dispatch costs beside its tokens, in tokens
COPY_AT_LEAST = 32  # tokens of a page that are worth a copy; fewer, if they are all there is to prefill


@dataclasses.dataclass(eq=False)
class Work:
    """One request from arrival to completion."""

    request: Request
    limit: int  # tokens it may get: max_new_tokens, or what the context has room for
    stops: StopStrings | None
    future: concurrent.futures.Future[Completion] = dataclasses.field(default_factory=concurrent.futures.Future)
    arrival: int = 0  # requests before it
    emitted: int = 0
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)  # one piece a dispatch
    logp: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    listener: Callable[[Piece], None] | None = None  # told of every piece, in the scheduler's thread

    def append(self, tokens: np.ndarray, logp: np.ndarray, version: int) -> None:
        self.tokens.append(tokens)
        self.logp.append(logp)
        self.versions.append(version)
        self.emitted += len(tokens)
        if self.listener is not None:
            self.listener(Piece(tokens, logp, np.full(len(tokens), version, np.int32), None))

    @property
    def plain(self) -> bool:
        """Returns whether the next tokens are drawn by temperature alone."""
        params = self.request.params
        return not params.greedy and params.top_p >= 1 and params.top_k == 0 and self.emitted >= params.min_new_tokens

    def sequence(self) -> np.ndarray:
        """Prompt, and completion so far."""
        return np.concatenate([self.request.prompt_ids, *self.tokens]).astype(np.int32)

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            np.concatenate([np.empty(0, np.int32), *self.tokens]),
            np.concatenate([np.empty(0, np.float32), *self.logp]),
            np.repeat(np.asarray(self.versions, np.int32), [len(tokens) for tokens in self.tokens]),
            finish,
        )


@dataclasses.dataclass(frozen=True)
class Source:
    """The first `count` tokens of a page, to be copied to another before the rest is prefilled."""

    page: int
    count: int
    target: int
    start: int  # position of the first of them


@dataclasses.dataclass(eq=False)
class Tenant:
    """A request's stay in a slot; one that is preempted and comes back is another tenant."""

    work: Work
    slot: int
    goal: int  # what `filled` must reach before the slot decodes
    pages: list[int]
    filled: int = 0  # leading tokens whose keys and values are in its pages
    learned: int = 0  # leading tokens that the pool knows
    source: Source | None = None
    indexed: bool = True  # its pages are of the present weights alone

    @property
    def last(self) -> int:
        """Tokens whose keys and values it may come to need."""
        return len(self.work.request.prompt_ids) + self.work.limit - 1


@dataclasses.dataclass(frozen=True)
class Copy:
    """A page to copy onto another of the same shard."""

    shard: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One prefill dispatch: `counts[i]` tokens of slot `slots[i]` from position `starts[i]`; unused
    rows have no tokens.
    """

    slots: np.ndarray  # [R] int32
    starts: np.ndarray  # [R] int32
    counts: np.ndarray  # [R] int32
    tables: np.ndarray  # [R, C] int32
    tokens: np.ndarray  # [R, T] int32


class SlotTable:
    """Tenants and tables of all slots, over one pool per shard: slots lie on the shards in order.

    A request's last token is never prefilled: the first decode step takes it in and draws the next.
    So prefill needs no logits, and a prompt whose prefix is all there needs no prefill.
    """

    def __init__(self, slots: int, context: int, *, page_size: int, pages: int, shards: int = 1) -> None:
        """
        Args:
          pages: of each shard's pool; enough for a row of `context` tokens.
        """
        self.tenants: list[Tenant | None] = [None] * slots
        self.tokens = np.zeros((slots, context), np.int32)  # prompt and completion of the tenant
        self.length = np.zeros(slots, np.int32)  # of those
        self.tables = np.full((slots, columns(context, page_size)), pages, np.int32)
        self._pools = [PagePool(pages, page_size) for _ in range(shards)]
        self._size, self._pages, self._per_shard = page_size, pages, slots // shards
        self._by_age: dict[Tenant, None] = {}  # oldest first
        self._filling: dict[Tenant, None] = {}  # of those, the ones that had tokens to prefill when last looked at
        self._free = [list(range(shard * self._per_shard, (shard + 1) * self._per_shard)) for shard in range(shards)]  # heaps
        self._growing = [0] * shards  # tenants that have not all of their own pages yet
        self._grouped: tuple[list[int], Groups] | None = None  # the last answer of `groups`

    @property
    def occupied(self) -> list[Tenant]:
        """Oldest first."""
        return list(self._by_age)

    @property
    def filling(self) -> list[Tenant]:
        """Oldest first, so that no prompt waits for ever."""
        for tenant in list(self._filling):
            if self._is_filled(tenant):
                del self._filling[tenant]
        return list(self._filling)

    def shard(self, slot: int) -> int:
        return slot // self._per_shard

    def _pool(self, tenant: Tenant) -> PagePool:
        return self._pools[self.shard(tenant.slot)]

    def _is_filled(self, tenant: Tenant) -> bool:
        """Goes through what others may have filled since."""
        pool, size = self._pool(tenant), self._size
        while tenant.filled < tenant.goal:
            page = tenant.filled // size
            reached = min(page * size + pool.filled[tenant.pages[page]], tenant.goal)
            if reached <= tenant.filled:
                return False
            tenant.filled = reached
        return True

    def admit(self, work: Work) -> Tenant | None:
        """Gives a request a slot and pages for what it has; None while there is no room.

        What is in the index, or is only being prefilled now, is shared: whole pages as they are, a
        part of one as the source to copy from, or that page itself where nobody holds it. A page
        per tenant that has not all of its own yet is left to them.
        """
        free = {shard: heap[0] for shard, heap in enumerate(self._free) if heap}
        if not free:
            return None
        tokens = work.sequence()
        goal = len(tokens) - 1
        matches = {shard: self._pools[shard].find(tokens[:goal]) for shard in free}
        for shard in sorted(free, key=lambda s: (-len(matches[s].pages), -matches[s].common, -self._pools[s].available)):
            pool, (shared, partial, count) = self._pools[shard], matches[shard]
            alone, spare = len(self._free[shard]) == self._per_shard, self._growing[shard]
            for page in shared:
                pool.hold(page)
            rest = goal - len(shared) * self._size
            taken = partial is not None and pool.is_idle(partial) and pool.known(partial) == count
            if partial is not None and not taken and count < min(rest, COPY_AT_LEAST):
                partial = None
            if partial is not None:
                pool.hold(partial)
            needed = columns(len(tokens), self._size) - len(shared)
            if partial is not None and alone and pool.available < needed - taken:
                pool.drop(partial)  # alone, and still too little: what it would copy from is in its way
                partial = None
            if pool.available >= needed - (partial is not None and taken) + spare:
                return self._settle(work, free[shard], tokens, shared, partial, count, taken)
            for page in [*([] if partial is None else [partial]), *reversed(shared)]:
                pool.drop(page)
        return None

    def _settle(
        self, work: Work, slot: int, tokens: np.ndarray, shared: list[int], partial: int | None, count: int, taken: bool
    ) -> Tenant:
        tenant = Tenant(work, slot, len(tokens) - 1, list(shared), learned=len(shared) * self._size)
        self.tenants[slot], self._grouped = tenant, None
        heapq.heappop(self._free[self.shard(slot)])
        self._by_age[tenant] = self._filling[tenant] = None
        self._growing[self.shard(slot)] += self._grows(tenant)
        self.tokens[slot, : len(tokens)], self.length[slot] = tokens, len(tokens)
        if partial is not None and taken:
            self._give(tenant, partial)
            tenant.learned += count
        self.grow(tenant, len(tokens))
        self.tables[slot, : len(tenant.pages)] = tenant.pages
        if partial is not None and not taken:
            tenant.source = Source(partial, count, tenant.pages[len(shared)], len(shared) * self._size)
        self._learn(tenant, tenant.goal)
        return tenant

    def grow(self, tenant: Tenant, tokens: int) -> bool:
        """Gives a tenant pages for so many tokens; False, and what there is, if those are too few."""
        if len(tenant.pages) * self._size >= tokens:
            return True
        pool = self._pool(tenant)
        while len(tenant.pages) * self._size < tokens and pool.available:
            self._give(tenant, pool.take())
        self.tables[tenant.slot, : len(tenant.pages)] = tenant.pages
        return len(tenant.pages) * self._size >= tokens

    def _give(self, tenant: Tenant, page: int) -> None:
        before = self._grows(tenant)
        tenant.pages.append(page)
        self._growing[self.shard(tenant.slot)] -= before and not self._grows(tenant)

    def _grows(self, tenant: Tenant) -> bool:
        """Returns whether it may come to need more pages than it has."""
        return len(tenant.pages) < columns(tenant.last, self._size)

    def copies(self, most: int) -> list[Copy]:
        """The copies that can be made now, at most so many; counts them as made.

        They are made at once, so none reads a page that another of them writes.
        """
        ready: list[Copy] = []
        written: set[tuple[int, int]] = set()
        promised: set[tuple[int, int]] = set()  # pages that an older tenant fills
        for tenant in self.filling:
            shard, pool, source = self.shard(tenant.slot), self._pool(tenant), tenant.source
            if source is not None and pool.filled[source.page] >= source.count:
                if len(ready) < most and (shard, source.page) not in written:
                    ready.append(Copy(shard, source.page, source.target))
                    written.add((shard, source.target))
                    pool.filled[source.target], tenant.source = source.count, None
                    pool.drop(source.page)
            elif source is not None and (shard, source.page) not in promised:
                pool.drop(source.page)  # its request ended before the page had the prefix
                tenant.source = None
            promised.update(self._unfilled(tenant))
        return ready

    def _unfilled(self, tenant: Tenant) -> list[tuple[int, int]]:
        """Shard and page of what it is to fill."""
        pages = tenant.pages[tenant.filled // self._size : columns(tenant.goal, self._size)]
        return [(self.shard(tenant.slot), page) for page in pages]

    def chunk(self, shapes: Sequence[tuple[int, int]]) -> Chunk | None:
        """The next prefill dispatch, of the (rows, tokens) shape that does what is waiting at
        least cost; counts it as made.
        """
        left: dict[Tenant, int] = {}
        promised: set[tuple[int, int]] = set()  # pages that an older tenant fills
        for tenant in self.filling:
            unfilled = self._unfilled(tenant)
            stop = tenant.goal if tenant.source is None else tenant.source.start
            if tenant.filled < stop and unfilled[0] not in promised:
                left[tenant] = stop - tenant.filled
            promised.update(unfilled)
        if not left:
            return None
        tokens = np.fromiter(left.values(), np.int64)

        def cost(shape: tuple[int, int]) -> int:
            rows, width = shape
            return math.ceil(sum(-(-tokens // width)) / rows) * (rows * width + DISPATCH)

        rows, width = min(shapes, key=cost)
        zeros, tables = np.zeros(rows, np.int32), np.full((rows, self.tables.shape[1]), self._pages, np.int32)
        chunk = Chunk(zeros, zeros.copy(), zeros.copy(), tables, np.zeros((rows, width), np.int32))
        for row, tenant in enumerate(list(left)[:rows]):
            start, count = tenant.filled, min(width, left[tenant])
            chunk.slots[row], chunk.starts[row], chunk.counts[row] = tenant.slot, start, count
            chunk.tables[row] = self.tables[tenant.slot]
            chunk.tokens[row, :count] = self.tokens[tenant.slot, start : start + count]
            self._fill(tenant, start + count)
        return chunk

    def _fill(self, tenant: Tenant, end: int) -> None:
        """Counts a tenant's tokens below `end` as filled: the pages of its own among them."""
        pool, size = self._pool(tenant), self._size
        for page in range(max(min(tenant.filled, end - 1), 0) // size, columns(end, size)):
            pool.filled[tenant.pages[page]] = min(end - page * size, size)
        tenant.filled = end

    def _learn(self, tenant: Tenant, end: int) -> None:
        """Tells the pool a tenant's tokens below `end`, so that others find them."""
        pool, size = self._pool(tenant), self._size
        while tenant.indexed and tenant.learned < end:
            page = tenant.learned // size
            stop = min((page + 1) * size, end)
            parent = tenant.pages[page - 1] if page else ROOT
            pool.learn(tenant.pages[page], parent, self.tokens[tenant.slot, tenant.learned : stop])
            tenant.learned = stop

    def extend(self, tenant: Tenant, tokens: np.ndarray) -> None:
        """Tokens that a decode dispatch drew for a tenant: the keys and values of all but the last
        are in its pages.
        """
        end = int(self.length[tenant.slot]) + len(tokens)
        self.tokens[tenant.slot, end - len(tokens) : end] = tokens
        self.length[tenant.slot] = end
        whole = (end - 1) // self._size * self._size
        if whole > tenant.filled:  # the pool is told of whole pages, and of the last one in the end
            self._fill(tenant, whole)
            self._learn(tenant, whole)
        tenant.filled = tenant.goal = end - 1

    def groups(self, slots: list[int]) -> Groups:
        """The given slots by the pages that they share, shard by shard."""
        if self._grouped is None or self._grouped[0] != slots:
            wanted, found = np.asarray(slots, np.int64), []
            for shard in range(len(self._pools)):
                first = shard * self._per_shard
                own = wanted[(wanted >= first) & (wanted < first + self._per_shard)] - first
                found.append(find_groups(self.tables[first : first + self._per_shard], self._pages, own))
            self._grouped = slots, Groups(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
        return self._grouped[1]

    def release(self, tenant: Tenant) -> None:
        """The tenant is gone; what its pages hold stays for others to share."""
        if tenant.filled == tenant.goal:
            self._fill(tenant, tenant.filled)
        self._learn(tenant, tenant.filled)
        pool = self._pool(tenant)
        for page in [*([] if tenant.source is None else [tenant.source.page]), *reversed(tenant.pages)]:
            pool.drop(page)  # the last first: the first is of use to more
        self.tables[tenant.slot] = self._pages
        self.tenants[tenant.slot], self._grouped = None, None
        heapq.heappush(self._free[self.shard(tenant.slot)], tenant.slot)
        self._growing[self.shard(tenant.slot)] -= self._grows(tenant)
        del self._by_age[tenant]
        self._filling.pop(tenant, None)

    def youngest(self, tenant: Tenant) -> Tenant:
        """The last to arrive of those whose pages are in the same pool."""
        shard = self.shard(tenant.slot)
        return max((t for t in self._by_age if self.shard(t.slot) == shard), key=lambda t: t.work.arrival)

    def swap(self, recompute: bool) -> list[Work]:
        """Weights changed: requests that are being prefilled start over, and with `recompute`
        everything in flight does. Returns them without their slots, the first to arrive first.

        Other tenants go on with the keys and values they have; no request that starts later finds
        any of these.
        """
        again = self.occupied if recompute else self.filling
        for tenant in again:
            self.release(tenant)
        for pool in self._pools:
            pool.clear()
        for tenant in self._by_age:
            tenant.indexed = False
        return sorted((tenant.work for tenant in again), key=lambda work: work.arrival)
