"""The slot table: what is shared, what is prefilled, what a weight swap undoes, what running out of pages does.

Followed by replaying what it orders.
"""

import numpy as np
import pytest

from rljax.engines.jax.sampling.pages import ROOT, PagePool
from rljax.engines.jax.sampling.slots import COPY_AT_LEAST, SlotTable, Work
from rljax.types import Request, SamplingParams

SHAPES = [(1, 8), (4, 16), (2, 32)]
PAGE = 16


def work_of(prompt, limit=8) -> Work:
    return Work(Request("r", np.asarray(prompt, np.int32), SamplingParams(limit), 0), limit, None)


class Cache:
    """Contents that the device's pages would have, by token: (token, version it was computed with)."""

    def __init__(self, table: SlotTable, pages: int) -> None:
        self.table, self.pages = table, np.full((len(table.tenants), pages, PAGE, 2), -1)

    def row(self, tenant):
        """[tokens, 2]: what a tenant's table leads to."""
        return self.pages[self.table.shard(tenant.slot), tenant.pages].reshape(-1, 2)

    def write(self, shard, table, start, tokens, version) -> None:
        for at, token in enumerate(tokens, start):
            self.pages[shard, table[at // PAGE], at % PAGE] = token, version

    def fill(self, version: int) -> int:
        """Carries out what the table orders until nothing is left; returns the tokens prefilled."""
        total = 0
        for _ in range(1000):
            before = self.pages.copy()  # the device reads every source before it writes a target
            for copy in self.table.copies(3):
                self.pages[copy.shard, copy.target] = before[copy.shard, copy.source]
            total += self.dispatch(version)
            if not self.table.filling:
                return total
        raise AssertionError("prefill does not end")

    def dispatch(self, version: int) -> int:
        """Carries out one prefill dispatch."""
        chunk = self.table.chunk(SHAPES)
        if chunk is None:
            return 0
        assert chunk.tokens.shape in SHAPES
        written = set()
        rows = zip(chunk.slots, chunk.starts, chunk.counts, chunk.tables, chunk.tokens, strict=True)
        for slot, start, count, table, tokens in rows:
            shard = self.table.shard(slot)
            self.write(shard, table, start, tokens[:count], version)
            own = {(shard, page) for page in table[start // PAGE : -(-(start + count) // PAGE)]} if count else set()
            assert not own & written, "a page is written by two rows"
            written |= own
        return int(chunk.counts.sum())

    def decode(self, tenant, tokens, version) -> None:
        """A dispatch that draws these tokens."""
        length = self.table.length[tenant.slot]
        assert self.table.grow(tenant, length - 1 + len(tokens))
        taken = np.concatenate([self.table.tokens[tenant.slot, length - 1 : length], tokens[:-1]])
        self.write(self.table.shard(tenant.slot), self.table.tables[tenant.slot], length - 1, taken, version)
        self.table.extend(tenant, np.asarray(tokens, np.int32))

    def check(self) -> None:
        """Every slot that could decode has the keys and values of all its tokens but the last."""
        filling = self.table.filling
        for tenant in self.table.occupied:
            if tenant not in filling:
                length = self.table.length[tenant.slot] - 1
                np.testing.assert_array_equal(self.row(tenant)[:length, 0], self.table.tokens[tenant.slot, :length])


def make(slots=4, context=128, pages=None, shards=1) -> tuple[SlotTable, Cache]:
    pages = slots // shards * -(-context // PAGE) if pages is None else pages
    table = SlotTable(slots, context, page_size=PAGE, pages=pages, shards=shards)
    return table, Cache(table, pages)


def prompts(*lengths, seed=0) -> list[np.ndarray]:
    return [np.random.default_rng([seed, i]).integers(0, 99, length).astype(np.int32) for i, length in enumerate(lengths)]


def test_a_group_s_prompt_is_prefilled_and_stored_once():
    table, cache = make(slots=8)
    (prompt,) = prompts(50)
    tenants = [table.admit(work_of(prompt)) for _ in range(8)]
    assert cache.fill(0) == 49  # all but the last token, which the first decode step takes in
    cache.check()
    assert len({tuple(tenant.pages[:3]) for tenant in tenants}) == 1  # three whole pages, the same for all
    assert len({tenant.pages[3] for tenant in tenants}) == 8  # what is written to is a tenant's own


@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, PAGE + 2])
def test_prompts_that_end_about_a_page(length):
    table, cache = make()
    for _ in range(3):
        table.admit(work_of(np.arange(length)))
    assert cache.fill(0) == length - 1
    cache.check()


def test_a_copy_of_a_copy_is_made_after_it():
    """More samples than copies in a dispatch, of a prompt of less than a page."""
    table, cache = make(slots=8)
    (prompt,) = prompts(12)
    for _ in range(8):
        table.admit(work_of(prompt))
    assert cache.fill(0) == 11
    cache.check()


def test_different_prompts_share_a_long_prefix_and_no_more():
    """Two pages and half a third: the half is copied where that is worth it."""
    table, cache = make(context=256)
    system, *questions = prompts(2 * PAGE + 8, 10, 12, 14)
    for question in questions:
        table.admit(work_of(np.concatenate([system, question])))
    assert COPY_AT_LEAST > 8
    assert cache.fill(0) == 2 * PAGE + sum(8 + n - 1 for n in (10, 12, 14))
    cache.check()


def test_the_next_turn_goes_on_where_the_last_one_ended():
    table, cache = make()
    (prompt, reply, answer) = prompts(10, 25, 7)
    tenant = table.admit(work_of(prompt, 25))
    cache.fill(0)
    for start in range(0, 25, 2):
        cache.decode(tenant, reply[start : start + 2], 0)
    cache.check()
    pages = tenant.pages
    table.release(tenant)
    table.admit(work_of(prompts(3, seed=9)[0]))  # someone else comes between
    again = table.admit(work_of(np.concatenate([prompt, reply, answer])))
    assert again.pages[:3] == pages  # the last of them is filled in part, and nobody's: no copy
    assert cache.fill(0) == 2 + (1 + 7) - 1  # the other's, then the reply's last token and the answer
    cache.check()


def test_two_next_turns_of_one_reply_do_not_write_into_one_page():
    table, cache = make()
    prompt, first, second = prompts(20, 5, 6)
    table.release(table.admit(work_of(prompt)))
    tenant = table.admit(work_of(prompt))
    cache.fill(0)
    table.release(tenant)
    for answer in (first, second):
        table.admit(work_of(np.concatenate([prompt, answer])))
    cache.fill(0)
    cache.check()


def test_no_stale_cache_of_older_weights_is_shared():
    table, cache = make()
    (prompt,) = prompts(40)
    first, second = table.admit(work_of(prompt)), table.admit(work_of(prompt))
    cache.fill(0)
    table.release(first)  # one idle page and some in use hold the prompt
    assert not table.swap(recompute=False)
    cache.decode(second, np.arange(20), 1)  # goes on with what it has, and fills a page
    tenant = table.admit(work_of(prompt))
    assert cache.fill(1) == 39
    assert np.all(cache.row(tenant)[:39, 1] == 1)
    reply = table.tokens[second.slot, : table.length[second.slot]].copy()
    table.release(second)
    tenant = table.admit(work_of(reply))
    cache.fill(1)
    assert np.all(cache.row(tenant)[: len(reply) - 1, 1] == 1)
    cache.check()


def test_a_prompt_being_prefilled_when_weights_change_starts_over():
    table, cache = make()
    (prompt,) = prompts(100)
    works = [work_of(prompt), work_of(prompt)]
    for arrival, work in enumerate(works):
        work.arrival = arrival
        table.admit(work)
    chunk = table.chunk(SHAPES)
    assert chunk is not None and 0 < chunk.counts.sum() < 99
    assert table.swap(recompute=False) == works and not table.occupied
    tenants = [table.admit(work) for work in works]
    assert cache.fill(1) == 99
    for tenant in tenants:
        assert np.all(cache.row(tenant)[:99, 1] == 1)
    cache.check()


def test_recomputing_prefills_prompt_and_completion_again():
    table, cache = make()
    prompt, reply = prompts(20, 6)
    work = work_of(prompt)
    tenant = table.admit(work)
    cache.fill(0)
    cache.decode(tenant, reply, 0)
    work.append(reply, np.zeros(6, np.float32), 0)
    assert table.swap(recompute=True) == [work]
    tenant = table.admit(work)
    assert cache.fill(1) == 25
    np.testing.assert_array_equal(cache.row(tenant)[:25, 0], np.concatenate([prompt, reply])[:25])
    assert np.all(cache.row(tenant)[:25, 1] == 1)


def test_pages_whose_first_tenant_goes_away_are_filled_by_the_next():
    table, cache = make(slots=3)
    (prompt, other) = prompts(100, 90)
    leader = table.admit(work_of(prompt))
    table.admit(work_of(prompt))
    done = cache.dispatch(0)
    assert 0 < done < 99
    table.release(leader)  # aborted in the middle of its prefill
    table.admit(work_of(other))
    table.admit(work_of(other))
    assert cache.fill(0) == 99 - done + 89
    cache.check()


def test_admission_waits_for_pages_and_leaves_one_to_every_tenant_that_grows():
    table, _ = make(slots=4, context=64, pages=6)
    first = table.admit(work_of(np.arange(30), limit=30))  # two pages now, four in the end
    assert table.admit(work_of(np.arange(50, 100))) is None  # four: there are, and then the first could not grow
    assert table.admit(work_of(np.arange(50, 80), limit=2)) is not None  # two, and no more
    assert table.grow(first, 59)
    assert not table.grow(first, 90) and table.admit(work_of([1])) is None
    table.release(first)
    assert table.admit(work_of(np.arange(50, 100))) is not None


def test_one_request_always_fits_alone():
    """Whatever is cached, and even where the page it would copy from is in its way."""
    table, cache = make(slots=2, context=64, pages=4)
    old, new = prompts(63, 63)
    for prompt in (new, old, np.append(old[:60], 5)):
        tenant = table.admit(work_of(prompt, 1))
        assert tenant is not None
        cache.fill(0)
        cache.check()
        table.release(tenant)


def test_the_last_to_arrive_is_the_youngest():
    table, _ = make()
    works = [work_of([i]) for i in range(3)]
    for arrival, work in zip((5, 9, 7), works, strict=True):
        work.arrival = arrival
        table.admit(work)
    assert table.youngest(table.occupied[0]).work is works[1]


def test_shards_share_nothing():
    table, cache = make(slots=4, shards=2)
    (prompt,) = prompts(50)
    tenants = [table.admit(work_of(prompt)) for _ in range(4)]
    assert sorted(tenant.slot for tenant in tenants) == [0, 1, 2, 3]
    assert cache.fill(0) == 2 * 49
    cache.check()
    groups = table.groups([tenant.slot for tenant in tenants])
    assert groups.own[:, 0].tolist() == [3] * 4  # three whole pages, read once in each shard
    assert np.count_nonzero(groups.items[:, 2]) == 2


def test_the_least_recently_used_page_goes_first_and_what_stands_under_it_with_it():
    pool = PagePool(4, 2)
    rows = [np.arange(4, dtype=np.int32), np.arange(10, 14, dtype=np.int32)]
    for row in rows:
        first, second = pool.take(), pool.take()
        pool.learn(first, ROOT, row[:2])
        pool.learn(second, first, row[2:])
        pool.filled[first] = pool.filled[second] = 2
        for page in (first, second):  # the first is the less recently used
            pool.drop(page)
    assert [pool.find(row).common + 2 * len(pool.find(row).pages) for row in rows] == [4, 4]
    assert pool.available == 4
    page = pool.take()
    assert not pool.find(rows[0]).pages and len(pool.find(rows[1]).pages) == 2
    assert pool.available == 3
    other = np.array([7, 8], np.int32)
    pool.learn(page, ROOT, other)
    assert pool.find(np.concatenate([other, rows[0][2:]])) == ([page], None, 0)  # not what stood under it before


def test_a_random_history_keeps_every_row_right():
    """Few pages and three shards of prompts; every page is free, idle or held by as many as say so."""
    generator = np.random.default_rng(0)
    for pages, shards, slots in ((9, 1, 5), (40, 1, 5), (12, 2, 6)):
        table, cache = make(slots=slots, context=128, pages=pages, shards=shards)
        version = 0
        stems = prompts(60, 60, 40)
        for _ in range(600):
            move = generator.integers(6)
            if move <= 1:
                stem = stems[generator.integers(3)][: generator.integers(1, 60)]
                table.admit(work_of(np.concatenate([stem, generator.integers(0, 99, generator.integers(1, 4))]), 60))
            elif move == 2 and table.occupied:
                table.release(table.occupied[generator.integers(len(table.occupied))])
            elif move == 3 and generator.integers(4) == 0:
                version += 1
                table.swap(bool(generator.integers(2)))
                cache.check()
            elif move == 4 and generator.integers(2):
                cache.fill(version)
                cache.check()
            elif move == 5:
                filling = table.filling
                for tenant in table.occupied:
                    drawn = generator.integers(0, 99, 4)
                    end = table.length[tenant.slot] - 1 + 4
                    if tenant not in filling and end < tenant.last and table.grow(tenant, end):
                        cache.decode(tenant, drawn, version)
            for tenant in table.occupied:  # what is of the present weights is, all of it
                if tenant.indexed:
                    assert np.all(cache.row(tenant)[: tenant.filled, 1] == version)
            check_references(table, pages)
            check_counts(table)
        cache.fill(version)
        cache.check()


def check_counts(table):
    """Counts that admission reads equal those that going through all tenants gives."""
    whole = [-(-tenant.last // PAGE) for tenant in table.occupied]
    for shard, heap in enumerate(table._free):
        slots = range(shard * table._per_shard, (shard + 1) * table._per_shard)
        assert sorted(heap) == [slot for slot in slots if table.tenants[slot] is None]
        own = [len(t.pages) < most for t, most in zip(table.occupied, whole, strict=True) if table.shard(t.slot) == shard]
        assert table._growing[shard] == sum(own)
    assert table.filling == [t for t in table.occupied if t.filled < t.goal]


def check_references(table, pages):
    for shard, pool in enumerate(table._pools):
        held = np.zeros(pages, int)
        for tenant in table.occupied:
            if table.shard(tenant.slot) == shard:
                np.add.at(held, tenant.pages + ([tenant.source.page] if tenant.source else []), 1)
        assert held.tolist() == pool._references
        assert sorted([*pool._free, *pool._idle]) == np.flatnonzero(held == 0).tolist()
