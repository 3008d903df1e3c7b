"""The scheduler over devices that are made of numpy: whatever comes when, a completion is that of its prompt and seed alone.

The imitation keeps, at each place of its pages, the token and the weights that were there when it was written, and draws a
token that depends on all it has read. So a page shared too early or given to two, a prefix of other weights, a slot that
decodes while it is being prefilled or an order left out changes what comes out.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.engine import WeightsInMemory, WeightSource
from rljax.engines.jax.sampling import scheduler as scheduler_module
from rljax.engines.jax.sampling.orders import HALT, START, Decoded
from rljax.engines.jax.sampling.scheduler import PATIENCE, Scheduler
from rljax.engines.jax.sampling.slots import Work
from rljax.types import Finish, Request, SamplingParams

VOCABULARY, STOP, SLOTS, CONTEXT, STEPS, PAGE = 7, 6, 4, 64, 4, 8


def draw(tokens, seed: int) -> int:
    return random.Random(f"{list(map(int, tokens))} {seed}").randrange(VOCABULARY)


def expected(request: Request, limit: int) -> list[int]:
    tokens = request.prompt_ids.tolist()
    while len(tokens) < len(request.prompt_ids) + limit:
        tokens.append(draw(tokens, request.seed))
        if tokens[-1] == STOP:
            break
    return tokens[len(request.prompt_ids) :]


def endless(prompt: list[int]) -> int:
    """A seed with which the completion of a prompt never stops."""
    return next(seed for seed in range(10**6) if STOP not in expected(work_of("", prompt, CONTEXT, seed).request, CONTEXT - 1))


class Devices:
    """`Programs` in numpy. A decode's log-prob is the age of the oldest weights it has read, as a number."""

    slots, context, decode_steps, copies, page_size, shards = SLOTS, CONTEXT, STEPS, 3, PAGE, 1
    shapes = ((1, 4), (2, 8), (3, 4))
    spec = SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self, pages: int = SLOTS * CONTEXT // PAGE) -> None:
        self.weights = 0
        self.pages = pages
        self.tokens = np.full((pages, PAGE), -1)
        self.written_by = np.full((pages, PAGE), -1)
        self.state = [None] * SLOTS
        self.sent: list[str] = []  # kinds of dispatches, in order
        self.gate = threading.Event()  # nothing is decoded before it is open
        self.gate.set()

    def copy(self, copies) -> None:
        before, by = self.tokens.copy(), self.written_by.copy()
        for copy in copies:
            self.tokens[copy.target], self.written_by[copy.target] = before[copy.source], by[copy.source]

    def write(self, table, at, token) -> None:
        self.tokens[table[at // PAGE], at % PAGE], self.written_by[table[at // PAGE], at % PAGE] = token, self.weights

    def prefill(self, chunk) -> None:
        self.sent.append("prefill")
        for start, count, table, tokens in zip(chunk.starts, chunk.counts, chunk.tables, chunk.tokens, strict=True):
            for at in range(count):
                self.write(table, start + at, tokens[at])

    def decode(self, orders, tables, groups, plain) -> Decoded:
        self.gate.wait()
        self.sent.append("decode")
        tables = tables.copy()  # the scheduler's own, which it changes
        drawn, age = np.full((STEPS, SLOTS), -1, np.int32), np.zeros((STEPS, SLOTS), np.float32)
        for slot, order in enumerate(orders):
            if order["action"] == START:
                self.state[slot] = {name: order[name].item() for name in ("token", "position", "limit", "token_index", "seed")}
            elif order["action"] == HALT:
                self.state[slot] = None
        for step in range(STEPS):
            for slot, state in enumerate(self.state):
                if state is None:
                    continue
                at = state["position"]
                self.write(tables[slot], at, state["token"])
                pages = tables[slot, : at // PAGE + 1]
                token = draw(self.tokens[pages].ravel()[: at + 1], state["seed"])
                drawn[step, slot], age[step, slot] = token, self.written_by[pages].ravel()[: at + 1].min()
                state.update(token=token, position=at + 1, token_index=state["token_index"] + 1)
                if token == STOP or state["token_index"] >= state["limit"]:
                    self.state[slot] = None
        return Decoded(drawn, age)

    def load(self, source: WeightSource) -> None:
        self.weights = source.params

    def wait(self) -> None: ...

    def free(self) -> None: ...


def work_of(name: str, prompt, limit: int, seed: int) -> Work:
    request = Request(name, np.asarray(prompt, np.int32), SamplingParams(limit, stop_token_ids=(STOP,)), seed)
    return Work(request, min(limit, CONTEXT - len(prompt)), None)


@st.composite
def requests(draw_):
    """Prompts with many prefixes in common, short and long, some that need more than one dispatch and some that don't."""
    stem = draw_(st.lists(st.integers(0, VOCABULARY - 2), min_size=40, max_size=40))
    made = []
    for i in range(draw_(st.integers(1, 16))):
        prompt = stem[: draw_(st.integers(1, 40))] + draw_(st.lists(st.integers(0, VOCABULARY - 2), max_size=8))
        made.append(work_of(str(i), prompt, draw_(st.integers(1, 12)), draw_(st.integers(0, 3))))
    return made


@dataclasses.dataclass
class Heard:
    """What a request began with: the newest weights that had been loaded when it was sent."""

    work: Work
    loaded: int


@given(
    works=requests(),
    ahead=st.integers(0, 2),
    recompute=st.booleans(),
    pages=st.sampled_from((CONTEXT // PAGE, 12, 32)),
    choices=st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_completions_depend_on_prompt_and_seed_alone(works, ahead, recompute, pages, choices):
    """Whatever else runs, with pages for all or for one alone."""
    devices = Devices(pages)
    scheduler = Scheduler(devices, recompute=recompute, ahead=ahead)
    heard, cancelled, loaded = [], set(), 0
    try:
        for work in works:
            if choices.random() < 0.3:
                loaded += 1
                scheduler.command(lambda to=loaded: scheduler.load(WeightsInMemory(to), to)).result(10)
            heard.append(Heard(work, loaded))
            scheduler.submit(work)
            if choices.random() < 0.2:
                victim = choices.choice(works[: len(heard)])
                if victim.future.cancel():
                    cancelled.add(victim.request.id)
        for item in heard:
            if item.work.request.id in cancelled:
                continue
            completion = item.work.future.result(10)
            assert completion.token_ids.tolist() == expected(item.work.request, item.work.limit)
            assert completion.finish is (Finish.STOP if completion.token_ids[-1] == STOP else Finish.LENGTH)
            assert np.all(completion.versions >= item.loaded)
            assert np.all(np.diff(completion.versions) >= 0)
            assert np.all(completion.logp >= item.loaded), "keys and values of weights older than the request"
            if recompute:
                np.testing.assert_array_equal(completion.logp, completion.versions)
    finally:
        scheduler.close()


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_short_request_in_a_slot_whose_last_tenant_is_still_being_read(ahead):
    """It starts in the dispatch that follows, so that dispatch must read as far as its prompt reaches."""
    for seed in range(40):
        devices = Devices()
        scheduler = Scheduler(devices, recompute=False, ahead=ahead)
        devices.gate.clear()
        works = [work_of(f"short {i}", [1, 2, i], 12, seed + i) for i in range(SLOTS)]
        works += [work_of(f"long {i}", [3] * 30 + [i], 2, seed + i) for i in range(SLOTS)]
        for work in works:
            scheduler.submit(work)
        devices.gate.set()
        for work in works:
            assert work.future.result(10).token_ids.tolist() == expected(work.request, work.limit)
        scheduler.close()


def longest_stall(sent: list[str]) -> int:
    """Prefill dispatches in a row after the first decode and before the last."""
    first, last = sent.index("decode"), len(sent) - 1 - sent[::-1].index("decode")
    runs = "".join("p" if kind == "prefill" else " " for kind in sent[first:last]).split()
    return max(map(len, runs), default=0)


@pytest.mark.parametrize("decoding, length, stall", [(3, 14, 1), (1, 24, PATIENCE)])
def test_long_prompts_do_not_stall_those_that_decode(monkeypatch, decoding, length, stall):
    """With most slots decoding, prefill takes turns with them; with few, it goes first, but not for ever."""
    monkeypatch.setattr(scheduler_module, "FEW", 3)
    devices = Devices()
    devices.shapes = ((1, 1),)  # a dispatch per prompt token
    scheduler = Scheduler(devices, recompute=False, ahead=0)
    going = [work_of(f"going {i}", [i + 1], CONTEXT, endless([i + 1])) for i in range(decoding)]
    late = [work_of(f"late {i}", [5 - i] * length, 2, i) for i in range(SLOTS - decoding)]
    scheduler.command(scheduler.pause).result(10)
    for work in going + late:
        scheduler.submit(work)
    scheduler.command(scheduler.resume)
    for work in going + late:
        assert work.future.result(10).token_ids.tolist() == expected(work.request, work.limit)
    scheduler.close()
    assert longest_stall(devices.sent) == stall


def without_room(ahead: int, limits=(40, 40, 40)):
    """Three requests of one page each at first, that all come to need six of eight pages."""
    devices = Devices(CONTEXT // PAGE)
    scheduler = Scheduler(devices, recompute=False, ahead=ahead)
    works = [work_of(str(i), [i + 1], limit, endless([i + 1])) for i, limit in enumerate(limits)]
    scheduler.command(scheduler.pause).result(10)
    for work in works:
        scheduler.submit(work)
    scheduler.command(scheduler.resume)
    return scheduler, works


@pytest.mark.parametrize("ahead", [0, 1])
def test_out_of_pages_the_youngest_goes_back_and_keeps_its_tokens(ahead):
    ended: list[str] = []
    scheduler, works = without_room(ahead)
    for work in works:
        work.future.add_done_callback(lambda _, work=work: ended.append(work.request.id))
    for work in works:
        assert work.future.result(10).token_ids.tolist() == expected(work.request, work.limit)
        assert sum(map(len, work.tokens)) == work.limit, "a token was drawn twice"
    scheduler.close()
    assert ended == ["0", "1", "2"]  # the first to arrive never waits for pages
    assert 2 <= scheduler.stats().preemptions <= 8
    assert scheduler.stats().generated_tokens == 120


def test_a_request_that_went_back_can_be_cancelled():
    scheduler, works = without_room(0)
    while not scheduler.stats().preemptions and not works[0].future.done():
        time.sleep(1e-3)
    assert scheduler.stats().preemptions
    works[2].future.cancel()
    for work in works[:2]:
        assert work.future.result(10).token_ids.tolist() == expected(work.request, work.limit)
    scheduler.close()


def test_a_request_that_is_cancelled_before_it_is_looked_at_never_starts():
    devices = Devices()
    devices.gate.clear()
    scheduler = Scheduler(devices, recompute=False, ahead=0)
    first, second, third = (work_of(str(i), [i + 1] * 9, 4, endless([i + 1] * 9)) for i in range(3))
    scheduler.submit(first)
    while "prefill" not in devices.sent:  # and then it waits at the gate
        time.sleep(1e-3)
    scheduler.submit(second)
    second.future.cancel()
    scheduler.submit(third)
    devices.gate.set()
    for work in (first, third):
        assert work.future.result(10).token_ids.tolist() == expected(work.request, work.limit)
    scheduler.close()
    assert scheduler.stats().prompt_tokens == 18 and not second.tokens
