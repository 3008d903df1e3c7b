"""The slot table: the request in each slot, and the tokens whose keys and values its row of the
cache holds.

A slot keeps its row when its request ends, so that the next turn of a conversation, or another
sample of the same prompt, finds its prefix there. Host side only: numpy, no device.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from rljax.engines.jax.stop_strings import StopStrings
from rljax.types import Completion, Finish, Piece, Request

DISPATCH = 64  # what a prefill dispatch costs beside its tokens, in tokens
SHARE_AT_LEAST = 32  # tokens of a prefix that are worth a copy; fewer, if they are all there is to prefill


@dataclasses.dataclass(eq=False)
class Work:
    """One request from arrival to completion."""

    request: Request
    limit: int  # tokens it may get: max_new_tokens, or what the context has room for
    stops: StopStrings | None
    future: concurrent.futures.Future[Completion] = dataclasses.field(default_factory=concurrent.futures.Future)
    emitted: int = 0
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)  # one piece a dispatch
    logp: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[np.ndarray] = dataclasses.field(default_factory=list)
    listener: Callable[[Piece], None] | None = None  # told of every piece, in the scheduler's thread

    def append(self, tokens: np.ndarray, logp: np.ndarray, version: int) -> None:
        self.tokens.append(tokens)
        self.logp.append(logp)
        self.versions.append(np.full(len(tokens), version, np.int32))
        self.emitted += len(tokens)
        if self.listener is not None:
            self.listener(Piece(tokens, logp, self.versions[-1], None))

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            np.concatenate([np.empty(0, np.int32), *self.tokens]),
            np.concatenate([np.empty(0, np.float32), *self.logp]),
            np.concatenate([np.empty(0, np.int32), *self.versions]),
            finish,
        )


@dataclasses.dataclass(frozen=True)
class Source:
    """A prefix to copy before the rest is prefilled: the first `length` tokens of a slot, while
    that tenant is in it.
    """

    slot: int
    length: int
    tenancy: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One prefill dispatch: `counts[i]` tokens of row `rows[i]` from position `starts[i]`; unused
    rows are out of range.
    """

    rows: np.ndarray  # [R] int32
    starts: np.ndarray  # [R] int32
    counts: np.ndarray  # [R] int32
    tokens: np.ndarray  # [R, C] int32

    @property
    def end(self) -> int:
        """Positions it reads or writes lie below this."""
        return int((self.starts + self.counts).max())


class SlotTable:
    """State of every slot, as arrays over slots.

    A request's last prompt token is never prefilled: the first decode step takes it in and draws
    token 0. So prefill needs no logits, and a prompt whose prefix is all there needs no prefill.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.work: list[Work | None] = [None] * slots
        self.tokens = np.zeros((slots, context), np.int32)  # prompt and completion of the present or the last tenant
        self.length = np.zeros(slots, np.int32)  # of those
        self.filled = np.zeros(slots, np.int32)  # leading tokens whose keys and values are in the cache
        self.goal = np.zeros(slots, np.int32)  # what `filled` must reach before the slot decodes
        self.version = np.full(slots, -1, np.int64)  # of the oldest weights behind the row
        self._tenancy = np.zeros(slots, np.int64)
        self._source: list[Source | None] = [None] * slots

    @property
    def occupied(self) -> list[int]:
        return [slot for slot, work in enumerate(self.work) if work is not None]

    @property
    def filling(self) -> list[int]:
        """Oldest tenant first, so that no prompt waits for ever."""
        slots = [slot for slot in self.occupied if self.filled[slot] < self.goal[slot]]
        return sorted(slots, key=lambda slot: self._tenancy[slot])

    def has_room(self) -> bool:
        return any(work is None for work in self.work)

    def admit(self, work: Work, version: int) -> int:
        """Gives a request a free slot: the one that holds its prefix, or the one unused for
        longest.

        Only rows of the current `version` are reused (no stale cache). A prefix in a slot that
        stays occupied, or that is only being prefilled now, is remembered as the source to copy
        from.
        """
        prompt = work.request.prompt_ids
        goal = len(prompt) - 1
        source = self._longest_prefix(prompt[:goal], version)
        if source is not None and self.work[source.slot] is None:
            slot, filled, source = source.slot, source.length, None
        else:
            free = [slot for slot, tenant in enumerate(self.work) if tenant is None and (not source or slot != source.slot)]
            slot, filled = min(free, key=lambda slot: (self.version[slot] == version, self._tenancy[slot])), 0
        self.work[slot], self._source[slot] = work, source
        self.tokens[slot, : len(prompt)] = prompt
        self.length[slot], self.filled[slot], self.goal[slot], self.version[slot] = len(prompt), filled, goal, version
        self._tenancy[slot] = self._tenancy.max() + 1
        return slot

    def _longest_prefix(self, wanted: np.ndarray, version: int) -> Source | None:
        if not len(wanted):
            return None
        differs = self.tokens[:, : len(wanted)] != wanted
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), len(wanted))
        will_hold = np.where([work is None for work in self.work], self.filled, np.maximum(self.filled, self.goal))
        common = np.where(self.version == version, np.minimum(common, will_hold), 0)
        best = int(common.argmax())
        length = int(common[best])
        goes_on = self.work[best] is None and 0 < length == self.filled[best]  # taken as it is: no copy, nothing lost
        worth = goes_on or length >= min(len(wanted), SHARE_AT_LEAST)
        return Source(best, length, int(self._tenancy[best])) if worth else None

    def copies(self, most: int) -> list[tuple[int, int, int]]:
        """(source, target, tokens) of the copies that can be made now, at most so many; counts
        them as made.

        They are made at once, so none reads a row that another of them writes.
        """
        ready: list[tuple[int, int, int]] = []
        written: set[int] = set()
        for slot in self.filling:
            source = self._source[slot]
            if source is None or len(ready) == most:
                continue
            if self._tenancy[source.slot] != source.tenancy or not self._will_hold(source):
                self._source[slot] = None  # its tenant went away before it held enough
            elif self.filled[source.slot] >= source.length and source.slot not in written:
                ready.append((source.slot, slot, source.length))
                written.add(slot)
                self.filled[slot], self._source[slot] = source.length, None
        return ready

    def _will_hold(self, source: Source) -> bool:
        occupied = self.work[source.slot] is not None
        return max(self.filled[source.slot], self.goal[source.slot] if occupied else 0) >= source.length

    def chunk(self, shapes: list[tuple[int, int]]) -> Chunk | None:
        """The next prefill dispatch, of the (rows, tokens) shape that does what is waiting at
        least cost; counts it as made.
        """
        waiting = [slot for slot in self.filling if self._source[slot] is None]
        if not waiting:
            return None
        left = self.goal - self.filled

        def cost(shape: tuple[int, int]) -> int:
            rows, width = shape
            return math.ceil(sum(-(-left[waiting] // width)) / rows) * (rows * width + DISPATCH)

        rows, width = min(shapes, key=cost)
        chunk = Chunk(
            np.full(rows, len(self.work), np.int32),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.int32),
            np.zeros((rows, width), np.int32),
        )
        for row, slot in enumerate(waiting[:rows]):
            start, count = self.filled[slot], min(width, left[slot])
            chunk.rows[row], chunk.starts[row], chunk.counts[row] = slot, start, count
            chunk.tokens[row, :count] = self.tokens[slot, start : start + count]
            self.filled[slot] += count
        return chunk

    def extend(self, slot: int, tokens: np.ndarray) -> None:
        """Tokens that a decode dispatch drew for the tenant: the keys and values of all but the
        last are in the cache.
        """
        end = self.length[slot] + len(tokens)
        self.tokens[slot, self.length[slot] : end] = tokens
        self.length[slot], self.filled[slot], self.goal[slot] = end, end - 1, end - 1

    def release(self, slot: int) -> None:
        """The tenant is done; its row stays for others to share."""
        self.work[slot], self._source[slot] = None, None
        self.goal[slot] = self.filled[slot]

    def swap(self, version: int, recompute: bool) -> None:
        """Weights changed: prompts that are being prefilled start over, and with `recompute`
        everything in flight does.

        Other tenants go on with the keys and values they have.
        """
        for slot in self.occupied if recompute else self.filling:
            self.filled[slot], self.goal[slot], self.version[slot] = 0, self.length[slot] - 1, version
            self._source[slot] = None
