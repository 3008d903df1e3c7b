"""Required behavior of every sampler, whatever its engine.

    class TestMySampler(SamplerContract):
        without = frozenset({"stop strings"})         # features that yours lacks are skipped

        def make(self, model):                        # 0 or 1: same shape, other weights
            return MySampler(config_of(), DIRECTORIES[model])

        def source(self, model):                      # the same weights, to be loaded
            return WeightsInDirectory(DIRECTORIES[model])

Everything goes through the interface of `rljax.engine.Sampler`. Expectations are derived: from
another run of the same request, from a sampler that started with the weights that another was
given, from what the request asked for.

Models are kept for a whole class, and so are the samplers `sampler` and `second`, of model 0 and 1;
a test that ends its sampler takes `own`. All tests of a class run in one event loop, in a thread of
its own (`loop`).
"""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rljax.engine import Sampler, WeightsInDirectory, WeightSource
from rljax.errors import PromptTooLong, SamplerError, UserError
from rljax.types import Completion, Finish, Piece, Request, SamplingParams

WAIT = 60.0  # seconds before a call counts as hung


class Loop:
    """An event loop in a thread.

    All tests of a class share it, because a client's connections belong to one loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SamplerContract(abc.ABC):
    """Tests of the contract.

    Subclasses say how a sampler is made, and set the figures of their model where they differ.
    """

    vocabulary = 100  # token ids of the models
    context = 64  # tokens of prompt and completion
    tolerance = 1e-4  # nats, between two computations of one log-prob
    reproducible = True  # one request gives the same tokens whatever runs beside it
    without: ClassVar[frozenset[str]] = frozenset()  # features that a simple engine lacks, of "top", "stop strings", "context"
    _loop: ClassVar[Loop]
    _made: ClassVar[dict[int, Sampler]]

    @abc.abstractmethod
    def make(self, model: int) -> Sampler:
        """Returns a new sampler with the weights of model 0 or 1, at version 0.

        Called outside of `loop`.
        """

    @abc.abstractmethod
    def source(self, model: int) -> WeightSource:
        """Returns the weights of model 0 or 1, as a learner would publish them."""

    def text(self, token_ids: np.ndarray) -> str:
        """Returns the text of a completion, special tokens included.

        Not needed `without` "stop strings".
        """
        raise NotImplementedError("a sampler that knows stop strings says how its tokens are decoded")

    # Helpers

    @classmethod
    def setup_class(cls) -> None:
        cls._loop = Loop()
        cls._made = {}

    @classmethod
    def teardown_class(cls) -> None:
        for sampler in cls._made.values():
            cls._loop.run(sampler.close())
        cls._loop.close()

    def _kept(self, model: int) -> Sampler:
        if model not in self._made:
            self._made[model] = self.make(model)
        return self._made[model]

    @pytest.fixture
    def loop(self) -> Loop:
        return self._loop

    @pytest.fixture
    def sampler(self, loop: Loop) -> Iterator[Sampler]:
        """Sampler of model 0, shared by the tests that leave it running with these weights."""
        sampler = self._kept(0)
        yield sampler
        loop.run(sampler.resume())
        if sampler.version:
            loop.run(publish(sampler, self.source(0), sampler.version + 1))

    @pytest.fixture
    def second(self) -> Sampler:
        """Sampler that was made with the weights of model 1."""
        return self._kept(1)

    @pytest.fixture
    def own(self, loop: Loop) -> Iterator[Sampler]:
        """Sampler of model 0 for one test, which may close it."""
        sampler = self.make(0)
        yield sampler
        loop.run(sampler.close())

    def prompt(self, length: int = 6, *, seed: int = 0) -> np.ndarray:
        return np.random.default_rng([length, seed]).integers(4, self.vocabulary, length, dtype=np.int32)

    def request(self, name: str, prompt: np.ndarray | None = None, *, seed: int = 0, **params: Any) -> Request:
        prompt = self.prompt() if prompt is None else prompt
        return Request(name, prompt, SamplingParams(**({"max_new_tokens": 8} | params)), seed)

    def needs(self, feature: str) -> None:
        if feature in self.without:
            pytest.skip(f"this sampler has no {feature}")

    def same(self, one: Completion, other: Completion) -> None:
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_allclose(one.logp, other.logp, atol=self.tolerance)
        assert one.finish is other.finish

    # One completion

    def test_a_completion_has_one_log_prob_and_one_version_a_token(self, sampler: Sampler, loop: Loop) -> None:
        completion = loop.run(sampler.generate(self.request("shape", seed=3)))
        assert completion.token_ids.dtype == completion.versions.dtype == np.int32
        assert completion.logp.dtype == np.float32
        assert len(completion.token_ids) == len(completion.logp) == len(completion.versions) == 8
        assert completion.finish is Finish.LENGTH
        assert np.all((completion.token_ids >= 0) & (completion.token_ids < self.vocabulary))
        assert np.all(np.isfinite(completion.logp)) and np.all(completion.logp <= 0)
        assert np.all(completion.versions == sampler.version)

    def test_greedy_is_deterministic_and_needs_no_seed(self, sampler: Sampler, loop: Loop) -> None:
        first = loop.run(sampler.generate(self.request("greedy", greedy=True, seed=1)))
        self.same(loop.run(sampler.generate(self.request("again", greedy=True, seed=2))), first)

    def test_a_seed_gives_the_same_completion_and_another_seed_another(self, sampler: Sampler, loop: Loop) -> None:
        first, again, other = (
            loop.run(sampler.generate(self.request(name, seed=seed, max_new_tokens=16)))
            for name, seed in (("first", 11), ("again", 11), ("other", 12))
        )
        self.same(first, again)
        assert first.token_ids.tolist() != other.token_ids.tolist()

    def test_the_samples_of_a_group_differ(self, sampler: Sampler, loop: Loop) -> None:
        async def group() -> list[Completion]:
            return await asyncio.gather(*(sampler.generate(self.request(f"g#{i}", seed=i)) for i in range(8)))

        assert len({tuple(completion.token_ids) for completion in loop.run(group())}) == 8

    def test_company_and_length_change_no_token(self, sampler: Sampler, loop: Loop) -> None:
        requests = [
            self.request(f"c{i}", self.prompt(3 + i % 5, seed=i % 3), seed=i, max_new_tokens=3 + i, temperature=0.5 + 0.1 * i)
            for i in range(11)
        ]

        async def together() -> list[Completion]:
            return await asyncio.gather(*(sampler.generate(request) for request in requests))

        crowd = loop.run(together())
        assert [len(completion.token_ids) for completion in crowd] == [3 + i for i in range(11)]
        if self.reproducible:
            for request, completion in zip(requests, crowd, strict=True):
                self.same(loop.run(sampler.generate(request)), completion)

    def test_a_shorter_limit_gives_a_prefix(self, sampler: Sampler, loop: Loop) -> None:
        long = loop.run(sampler.generate(self.request("long", seed=5, max_new_tokens=12)))
        short = loop.run(sampler.generate(self.request("short", seed=5, max_new_tokens=7)))
        np.testing.assert_array_equal(short.token_ids, long.token_ids[:7])

    def test_the_pieces_of_a_stream_are_the_completion(self, sampler: Sampler, loop: Loop) -> None:
        request = self.request("free", seed=13, max_new_tokens=12)

        async def collect() -> list[Piece]:
            return [piece async for piece in sampler.stream(request)]

        pieces = loop.run(collect())
        assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        last = pieces[-1].finish
        assert last is not None
        joined = Completion(
            np.concatenate([piece.token_ids for piece in pieces]),
            np.concatenate([piece.logp for piece in pieces]),
            np.concatenate([piece.versions for piece in pieces]),
            last,
        )
        self.same(joined, loop.run(sampler.generate(request)))

    def test_a_stream_that_is_left_early_leaves_the_others_alone(self, sampler: Sampler, loop: Loop) -> None:
        async def leave() -> Completion:
            other = asyncio.create_task(sampler.generate(self.request("other", seed=1, max_new_tokens=20)))
            async with contextlib.aclosing(sampler.stream(self.request("left", max_new_tokens=40))) as pieces:
                await anext(pieces)
            return await other

        assert len(loop.run(leave()).token_ids) == 20

    # Distribution

    def test_truncated_sampling_gives_one_kept_token_probability_one(self, sampler: Sampler, loop: Loop) -> None:
        self.needs("top")
        greedy = loop.run(sampler.generate(self.request("greedy", greedy=True)))
        for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
            completion = loop.run(sampler.generate(self.request("narrow", seed=4, **narrow)))
            np.testing.assert_array_equal(completion.token_ids, greedy.token_ids)
            np.testing.assert_allclose(completion.logp, 0.0, atol=self.tolerance)

    def test_sampling_temperature_is_that_of_the_log_probs(self, sampler: Sampler, loop: Loop) -> None:
        """Greedy reports log-probs at temperature 1; near 0 the same token has probability 1."""
        warm = loop.run(sampler.generate(self.request("warm", greedy=True, max_new_tokens=1)))
        cold = loop.run(sampler.generate(self.request("cold", temperature=1e-4, max_new_tokens=1, seed=9)))
        hot = [loop.run(sampler.generate(self.request(f"h{i}", temperature=1e4, max_new_tokens=1, seed=i))) for i in range(4)]
        np.testing.assert_array_equal(cold.token_ids, warm.token_ids)
        assert warm.logp[0] < cold.logp[0]
        np.testing.assert_allclose([c.logp[0] for c in hot], -np.log(self.vocabulary), atol=1e-2)

    # Ends

    def test_a_stop_id_ends_a_completion_and_is_part_of_it(self, sampler: Sampler, loop: Loop) -> None:
        free = loop.run(sampler.generate(self.request("free", seed=6, max_new_tokens=12)))
        stop = int(free.token_ids[4])
        first = free.token_ids.tolist().index(stop)
        ended = loop.run(sampler.generate(self.request("ended", seed=6, max_new_tokens=12, stop_token_ids=(1, stop))))
        np.testing.assert_array_equal(ended.token_ids, free.token_ids[: first + 1])
        assert ended.finish is Finish.STOP

    def test_stop_ids_are_not_drawn_before_the_minimum(self, sampler: Sampler, loop: Loop) -> None:
        free = loop.run(sampler.generate(self.request("free", greedy=True, max_new_tokens=1)))
        stop = int(free.token_ids[0])  # the likeliest token of all would end it at once
        completion = loop.run(
            sampler.generate(self.request("minimum", greedy=True, min_new_tokens=3, max_new_tokens=4, stop_token_ids=(stop,)))
        )
        assert stop not in completion.token_ids[:3]
        assert len(completion.token_ids) == 4 or completion.finish is Finish.STOP

    def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(self, sampler: Sampler, loop: Loop) -> None:
        self.needs("stop strings")
        free = loop.run(sampler.generate(self.request("free", seed=7, max_new_tokens=12)))
        texts = [self.text(free.token_ids[:count]) for count in range(13)]
        count = next(count for count in range(5, 13) if len(texts[count]) > len(texts[count - 1]) > len(texts[count - 2]))
        stop = texts[count][len(texts[count - 2]) :]  # the text of two tokens
        first = next(c for c in range(13) if stop in texts[c])
        ended = loop.run(sampler.generate(self.request("ended", seed=7, max_new_tokens=12, stop=("never this", stop))))
        np.testing.assert_array_equal(ended.token_ids, free.token_ids[:first])
        assert ended.finish is Finish.STOP

    def test_a_full_context_ends_a_completion_by_length(self, sampler: Sampler, loop: Loop) -> None:
        self.needs("context")
        prompt = self.prompt(self.context - 3)
        completion = loop.run(sampler.generate(self.request("full", prompt, max_new_tokens=50)))
        assert len(completion.token_ids) == 3
        assert completion.finish is Finish.LENGTH

    @pytest.mark.parametrize("length", ["empty", "context", "longer"])
    def test_a_prompt_that_does_not_fit_fails_alone(self, sampler: Sampler, loop: Loop, length: str) -> None:
        if length != "empty":
            self.needs("context")
        prompt = self.prompt({"empty": 0, "context": self.context, "longer": self.context + 40}[length])

        async def both() -> tuple[Any, Any]:
            good, bad = self.request("good", max_new_tokens=4), self.request("bad", prompt)
            return await asyncio.gather(sampler.generate(good), sampler.generate(bad), return_exceptions=True)

        good, bad = loop.run(both())
        assert len(good.token_ids) == 4
        assert isinstance(bad, UserError if length == "empty" else PromptTooLong) and "\n" not in str(bad)

    # Many at once

    def test_more_requests_than_room_all_complete(self, sampler: Sampler, loop: Loop) -> None:
        async def flood() -> list[Completion]:
            prompts = [self.prompt(1 + i % 9, seed=i) for i in range(60)]
            calls = (self.request(f"f{i}", p, seed=i, max_new_tokens=1 + i % 7) for i, p in enumerate(prompts))
            return await asyncio.gather(*(sampler.generate(call) for call in calls))

        assert [len(completion.token_ids) for completion in loop.run(flood())] == [1 + i % 7 for i in range(60)]

    def test_a_cancelled_request_leaves_the_others_alone(self, sampler: Sampler, loop: Loop) -> None:
        async def cancel_some() -> list[Any]:
            tasks = [asyncio.create_task(sampler.generate(self.request(f"t{i}", seed=i, max_new_tokens=40))) for i in range(20)]
            await asyncio.sleep(0.01)
            for task in tasks[::2]:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = loop.run(cancel_some())
        for result in results[::2]:  # one may have ended before it was cancelled
            assert isinstance(result, asyncio.CancelledError) or len(result.token_ids) == 40
        assert all(len(result.token_ids) == 40 for result in results[1::2])

    # Pauses and weights

    def test_nothing_is_generated_in_a_pause(self, sampler: Sampler, loop: Loop) -> None:
        loop.run(sampler.pause())
        loop.run(sampler.pause())
        waiting = loop.start(sampler.generate(self.request("waiting", max_new_tokens=4)))
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.2)
        loop.run(sampler.resume())
        assert len(waiting.result(WAIT).token_ids) == 4

    def test_a_pause_nobody_waits_for_any_more_harms_nothing(self, sampler: Sampler, loop: Loop) -> None:
        async def cancelled() -> None:
            for _ in range(5):
                pausing = asyncio.create_task(sampler.pause())
                await asyncio.sleep(0)
                pausing.cancel()
                await asyncio.gather(pausing, return_exceptions=True)
            await sampler.resume()

        loop.run(cancelled())
        assert len(loop.run(sampler.generate(self.request("after", max_new_tokens=4))).token_ids) == 4

    def test_no_stale_cache_after_a_publish(self, sampler: Sampler, second: Sampler, loop: Loop) -> None:
        """Keys and values of prompts and completions were cached under the old weights."""
        prompts = [self.prompt(20, seed=i) for i in range(3)]
        requests = [self.request(f"p{i}", prompt, greedy=True) for i, prompt in enumerate(prompts)]

        async def complete(at: Sampler) -> list[Completion]:
            return await asyncio.gather(*(at.generate(request) for request in requests))

        before = loop.run(complete(sampler))
        version = sampler.version + 1
        loop.run(publish(sampler, self.source(1), version))
        assert sampler.version == version
        after, fresh = loop.run(complete(sampler)), loop.run(complete(second))
        for new, want in zip(after, fresh, strict=True):
            self.same(new, want)
            assert np.all(new.versions == version)
        assert any(np.abs(new.logp - old.logp).max() > 10 * self.tolerance for new, old in zip(after, before, strict=True))

    def test_requests_in_a_pause_start_with_the_weights_loaded_in_it(
        self, sampler: Sampler, second: Sampler, loop: Loop
    ) -> None:
        request = self.request("w", self.prompt(20), greedy=True)
        loop.run(sampler.generate(request))

        async def swap() -> Completion:
            await sampler.pause()
            waiting = asyncio.create_task(sampler.generate(request))
            await asyncio.sleep(0.05)
            await sampler.load_weights(self.source(1), sampler.version + 1)
            await sampler.resume()
            return await waiting

        completion = loop.run(swap())
        self.same(completion, loop.run(second.generate(request)))
        assert np.all(completion.versions == sampler.version)

    def test_a_request_in_flight_goes_on_under_new_weights(self, sampler: Sampler, loop: Loop) -> None:
        """Versions rise at one token, and the tokens before it are those of the old weights."""
        request = self.request("flight", self.prompt(4), seed=8, max_new_tokens=self.context - 4)
        old = loop.run(sampler.generate(request))
        delay, versions = 1e-4, np.zeros(0)
        for _ in range(60):
            first = sampler.version
            completion, _ = loop.run(self._swap_under(sampler, request, delay))
            versions = completion.versions
            assert len(versions) == self.context - 4
            assert np.all(np.diff(versions) >= 0) and set(versions) <= {first, first + 1}
            if versions[0] < versions[-1]:
                break
            loop.run(publish(sampler, self.source(0), sampler.version + 1))
            delay *= 1.3 if versions[0] > first else 0.7
        kept = int((versions == versions[0]).sum())
        assert 0 < kept < len(versions), "no swap fell into the completion"
        if self.reproducible:
            np.testing.assert_array_equal(completion.token_ids[:kept], old.token_ids[:kept])

    async def _swap_under(self, sampler: Sampler, request: Request, delay: float) -> tuple[Completion, None]:
        async def swap() -> None:
            await asyncio.sleep(delay)
            await publish(sampler, self.source(1), sampler.version + 1)

        return await asyncio.gather(sampler.generate(request), swap())

    def test_weights_that_cannot_be_loaded_leave_the_old_ones(self, sampler: Sampler, loop: Loop, tmp_path: Path) -> None:
        request = self.request("kept", greedy=True)
        version = sampler.version
        before = loop.run(sampler.generate(request))
        with pytest.raises(UserError):
            loop.run(publish(sampler, WeightsInDirectory(tmp_path / "nothing"), version + 1))
        self.same(loop.run(sampler.generate(request)), before)
        assert sampler.version == version

    def test_memory_that_was_lent_comes_back_with_the_next_publish(self, sampler: Sampler, second: Sampler, loop: Loop) -> None:
        """A waiting request lost its cache too: it goes on as one of the new weights alone would."""
        if not sampler.lends:
            pytest.skip("this sampler lends no memory")
        prompt, length = self.prompt(4), self.context - 4
        request = self.request("free", prompt, greedy=True, max_new_tokens=length)
        delay, kept = 1e-4, 0
        for _ in range(40):
            flown = loop.run(self._lent_under(sampler, request, delay))
            kept = int((flown.versions < sampler.version).sum())
            if kept and (flown.finish is Finish.ABORT or kept < length):
                break
            loop.run(publish(sampler, self.source(0), sampler.version + 1))
            delay *= 0.7 if kept else 1.3
        assert kept, "nothing was in flight when the memory was lent"
        if flown.finish is not Finish.ABORT:
            behind = np.concatenate([prompt, flown.token_ids[:kept]])
            rest = loop.run(second.generate(self.request("free", behind, greedy=True, max_new_tokens=length - kept)))
            np.testing.assert_array_equal(flown.token_ids[kept:], rest.token_ids)
            np.testing.assert_allclose(flown.logp[kept:], rest.logp, atol=self.tolerance)
        self.same(loop.run(sampler.generate(request)), loop.run(second.generate(request)))

    async def _lent_under(self, sampler: Sampler, request: Request, delay: float) -> Completion:
        flying = asyncio.create_task(sampler.generate(request))
        await asyncio.sleep(delay)
        await sampler.release()
        await sampler.reclaim()
        await publish(sampler, self.source(1), sampler.version + 1)
        return await flying

    # The end

    def test_closing_ends_what_is_in_flight_and_keeps_its_tokens(self, own: Sampler, loop: Loop) -> None:
        requests = [self.request(f"e{i}", seed=i, max_new_tokens=self.context - 6) for i in range(30)]
        whole = [loop.run(own.generate(request)) for request in requests[:2]]

        async def close_under() -> list[Completion]:
            tasks = [asyncio.create_task(own.generate(request)) for request in requests]
            await asyncio.sleep(0.01)
            await own.close()
            return await asyncio.gather(*tasks)

        completions = loop.run(close_under())
        assert any(completion.finish is Finish.ABORT for completion in completions)
        for completion in completions:
            assert completion.finish is Finish.ABORT or len(completion.token_ids) == self.context - 6
        if self.reproducible:
            for full, completion in zip(whole, completions, strict=False):
                np.testing.assert_array_equal(completion.token_ids, full.token_ids[: len(completion.token_ids)])
        with pytest.raises(SamplerError):
            loop.run(own.generate(requests[0]))
        loop.run(own.close())  # a second close does nothing

    def test_closing_a_paused_sampler_hangs_nobody(self, own: Sampler, loop: Loop) -> None:
        async def close_paused() -> Completion:
            await own.pause()
            waiting = asyncio.create_task(own.generate(self.request("never")))
            await asyncio.sleep(0.02)
            await own.close()
            return await waiting

        completion = loop.run(close_paused())
        assert completion.finish is Finish.ABORT and not len(completion.token_ids)


async def publish(sampler: Sampler, source: WeightSource, version: int) -> None:
    """Replaces the weights as `Engine.publish` does."""
    await sampler.pause()
    try:
        await sampler.load_weights(source, version)
    finally:
        await sampler.resume()
