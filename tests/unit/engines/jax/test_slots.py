"""The slot table: what is shared, what is prefilled, what a weight swap undoes.

Followed by replaying what it orders.
"""

import numpy as np
import pytest

from rljax.engines.jax.slots import SHARE_AT_LEAST, SlotTable, Work
from rljax.types import Request, SamplingParams

SHAPES = [(1, 8), (4, 16), (2, 32)]


def work_of(prompt) -> Work:
    return Work(Request("r", np.asarray(prompt, np.int32), SamplingParams(8), 0), 8, None)


class Cache:
    """What the device's rows would hold, by token: (token, version it was computed with)."""

    def __init__(self, table: SlotTable, slots: int, context: int) -> None:
        self.table, self.rows = table, np.full((slots, context, 2), -1)

    def fill(self, version: int) -> int:
        """Carries out what the table orders until nothing is left; returns the tokens prefilled."""
        total = 0
        for _ in range(1000):
            before = self.rows.copy()  # the device reads every source before it writes a target
            for source, target, length in self.table.copies(3):
                assert np.all(before[source, :length, 0] == self.table.tokens[target, :length])
                self.rows[target, :length] = before[source, :length]
            if chunk := self.table.chunk(SHAPES):
                assert chunk.tokens.shape in SHAPES
                for row, start, count, tokens in zip(chunk.rows, chunk.starts, chunk.counts, chunk.tokens, strict=True):
                    if row < len(self.rows):
                        self.rows[row, start : start + count] = np.stack([tokens[:count], np.full(count, version)], -1)
                        total += count
            if not self.table.filling:
                return total
        raise AssertionError("prefill does not end")

    def check(self) -> None:
        """Every slot that could decode has the keys and values of all its tokens but the last."""
        for slot in self.table.occupied:
            length = self.table.length[slot] - 1
            np.testing.assert_array_equal(self.rows[slot, :length, 0], self.table.tokens[slot, :length])


def make(slots=4, context=128) -> tuple[SlotTable, Cache]:
    table = SlotTable(slots, context)
    return table, Cache(table, slots, context)


def prompts(*lengths, seed=0) -> list[np.ndarray]:
    return [np.random.default_rng([seed, i]).integers(0, 99, length).astype(np.int32) for i, length in enumerate(lengths)]


def test_a_group_s_prompt_is_prefilled_once():
    table, cache = make(slots=8)
    (prompt,) = prompts(50)
    for _ in range(8):
        table.admit(work_of(prompt), 0)
    assert cache.fill(0) == 49  # all but the last token, which the first decode step takes in
    cache.check()


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_prompts(length):
    table, cache = make()
    for _ in range(3):
        table.admit(work_of(np.arange(length)), 0)
    assert cache.fill(0) == length - 1
    cache.check()


def test_a_copy_of_a_copy_is_made_after_it():
    table, cache = make(slots=4)
    other, prompt = prompts(20, 50)
    tenants = [table.admit(work_of(other), 0) for _ in range(4)]
    cache.fill(0)
    for slot in reversed(tenants):  # later tenants get lower slots, where the search for a prefix looks first
        table.release(slot)
        table.admit(work_of(prompt), 0)
    assert cache.fill(0) == 49
    cache.check()


def test_different_prompts_share_a_long_prefix_and_no_more():
    table, cache = make()
    system, *questions = prompts(SHARE_AT_LEAST + 8, 10, 12, 14)
    for question in questions:
        table.admit(work_of(np.concatenate([system, question])), 0)
    assert cache.fill(0) == len(system) + 9 + 11 + 13
    cache.check()


def test_the_next_turn_goes_on_in_its_own_row():
    table, cache = make()
    (prompt, reply, answer) = prompts(10, 5, 7)
    slot = table.admit(work_of(prompt), 0)
    cache.fill(0)
    for start in range(0, 5, 2):  # as decode dispatches do it
        piece = reply[start : start + 2]
        position = table.length[slot] - 1
        taken = np.concatenate([table.tokens[slot, position : position + 1], piece[:-1]])
        cache.rows[slot, position : position + len(piece)] = np.stack([taken, np.zeros(len(piece))], -1)
        table.extend(slot, piece)
    cache.check()
    table.release(slot)
    table.admit(work_of(prompts(3, seed=9)[0]), 0)  # someone else takes another slot
    again = table.admit(work_of(np.concatenate([prompt, reply, answer])), 0)
    assert again == slot
    assert cache.fill(0) == 2 + (1 + 7) - 1  # the other's, then the reply's last token and the answer
    cache.check()


def test_no_stale_cache_of_older_weights_is_shared():
    table, cache = make()
    (prompt,) = prompts(40)
    first = table.admit(work_of(prompt), 0)
    cache.fill(0)
    table.admit(work_of(prompt), 0)
    cache.fill(0)
    table.release(first)  # one idle row and one in use hold the prompt
    table.swap(1, recompute=False)
    slot = table.admit(work_of(prompt), 1)
    assert cache.fill(1) == 39
    assert np.all(cache.rows[slot, :39, 1] == 1)
    cache.check()


def test_a_prompt_being_prefilled_when_weights_change_starts_over():
    table, cache = make()
    (prompt,) = prompts(100)
    leader, follower = table.admit(work_of(prompt), 0), table.admit(work_of(prompt), 0)
    chunk = table.chunk(SHAPES)
    assert chunk is not None and 0 < chunk.counts.sum() < 99
    table.swap(1, recompute=False)
    cache.fill(1)
    assert np.all(cache.rows[[leader, follower], :99, 1] == 1)
    cache.check()


def test_recomputing_prefills_prompt_and_completion_again():
    table, cache = make()
    prompt, reply = prompts(20, 6)
    slot = table.admit(work_of(prompt), 0)
    cache.fill(0)
    table.extend(slot, reply)
    table.swap(1, recompute=True)
    assert cache.fill(1) == 25
    np.testing.assert_array_equal(cache.rows[slot, :25, 0], np.concatenate([prompt, reply])[:25])
    assert np.all(cache.rows[slot, :25, 1] == 1)


def test_a_source_that_goes_away_is_not_waited_for():
    table, cache = make(slots=3)
    (prompt, other) = prompts(100, 90)
    leader = table.admit(work_of(prompt), 0)
    table.admit(work_of(prompt), 0)
    table.chunk(SHAPES)
    table.release(leader)  # aborted in the middle of its prefill
    table.admit(work_of(other), 0)
    table.admit(work_of(other), 0)
    cache.fill(0)
    cache.check()


def test_a_random_history_keeps_every_row_right():
    generator = np.random.default_rng(0)
    table, cache = make(slots=5)
    version = 0
    stems = prompts(60, 60, 40)
    for _ in range(400):
        move = generator.integers(5)
        if move <= 1 and table.has_room():
            stem = stems[generator.integers(3)][: generator.integers(1, 60)]
            table.admit(work_of(np.concatenate([stem, generator.integers(0, 99, generator.integers(1, 4))])), version)
        elif move == 2 and table.occupied:
            table.release(int(generator.choice(table.occupied)))
        elif move == 3 and generator.integers(4) == 0:
            version += 1
            table.swap(version, bool(generator.integers(2)))
        elif move == 4 and generator.integers(2):
            cache.fill(version)
            cache.check()
        for slot in np.flatnonzero(table.version == version):  # a row that says it is of the current weights is
            assert np.all(cache.rows[slot, : table.filled[slot], 1] == version)
    cache.fill(version)
    cache.check()
