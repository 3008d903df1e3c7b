"""The JAX sampler beyond the contract: against a plain forward pass, counts of compilations, swaps at a known step, meshes."""

import asyncio
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rljax.backends.jax import hf
from rljax.config.allocation import Pool
from rljax.engine import WeightsInDirectory, WeightsInMemory
from rljax.engines.jax.sampling.sampler import JaxSampler
from rljax.engines.jax.scoring import scorer_of
from rljax.errors import SamplerError, UserError
from rljax.hf.spec import ModelSpec
from rljax.testing.models import VOCABULARY, config_of, make_model
from rljax.types import Finish, Request, SamplingParams

BOUND = 2e-5  # nats, float32: sampler against a forward pass over the whole sequence


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [make_model(root / str(seed), seed=seed) for seed in (0, 1)]


@contextlib.contextmanager
def sampler_of(model_dir, pool=None, **settings):
    ahead = settings.pop("ahead", None)
    keys = {name if "." in name else f"jax.{name}": value for name, value in settings.items()}
    sampler = JaxSampler(config_of(**keys), pool or Pool("jax"), model_dir, ahead=ahead)
    try:
        yield sampler
    finally:
        asyncio.run(sampler.close())


def generate(sampler, requests):
    async def all_of_them():
        return await asyncio.gather(*(sampler.generate(request) for request in requests))

    return asyncio.run(all_of_them())


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(4, VOCABULARY, length, dtype=np.int32)


def requests_of(lengths, **params):
    return [
        Request(f"r{i}", prompt_of(n, i), SamplingParams(**({"max_new_tokens": 9} | params)), i) for i, n in enumerate(lengths)
    ]


@functools.cache
def forward(model_dir, temperature):
    graphdef, params = hf.load(model_dir)

    @jax.jit
    def logp(token_ids):
        model = nnx.merge(graphdef, params)
        hidden = model(token_ids, jnp.arange(token_ids.shape[1])[None])
        return jax.nn.log_softmax(model.logits(hidden) / temperature)

    return logp


def scored(model_dir, request, completion, temperature=1.0):
    """Log-probs of a completion's tokens by one forward pass without a cache, prompt and completion padded to 160."""
    token_ids = np.concatenate([request.prompt_ids, completion.token_ids])
    padded = np.zeros((1, 160), np.int32)
    padded[0, : len(token_ids)] = token_ids
    logp = forward(model_dir, temperature)(padded)[0]
    at = np.arange(len(request.prompt_ids), len(token_ids))
    return np.asarray(logp)[at - 1, token_ids[at]]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_unit_ratio_of_sampled_log_probs_and_a_plain_forward_pass(tmp_path, architecture):
    """Over every span, prompts of one token, of several chunks, shared in part and whole; at two temperatures."""
    model = make_model(tmp_path, architecture=architecture)
    lengths = (1, 2, 16, 17, 33, 64, 70, 119, 128, 151)
    with sampler_of(model, context_length=160, prefill_chunk=16) as sampler:
        for temperature in (1.0, 0.6):
            requests = requests_of(lengths, temperature=temperature)
            requests += [Request("turn", np.append(requests[5].prompt_ids, [5, 6, 7]), requests[5].params, 99)]
            requests += [Request("twin", requests[6].prompt_ids, requests[6].params, 98)]
            for request, completion in zip(requests, generate(sampler, requests), strict=True):
                assert len(completion.token_ids) == 9
                np.testing.assert_allclose(completion.logp, scored(model, request, completion, temperature), atol=BOUND)


def test_nothing_compiles_after_construction(models):
    """Whatever is asked for, and after weight swaps: neither these programs nor anything else in the process."""
    events = []

    def listen(name, *_, **__):
        if "compile" in name:
            events.append(name)

    with sampler_of(models[0], context_length=160) as sampler:
        compiled = sampler.compilations
        source = WeightsInMemory(hf.load(models[1])[1])
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            requests = requests_of((1, 3, 20, 40, 100, 150), max_new_tokens=5)
            for round_, params in enumerate(
                (
                    {},
                    {"greedy": True},
                    {"top_k": 3, "temperature": 0.7},
                    {"top_p": 0.9, "stop_token_ids": (3, 4, 5), "min_new_tokens": 2},
                    {"stop": ("a", "bcd")},
                )
            ):
                generate(sampler, requests + requests_of((2, 9, 9, 33), **params))
                asyncio.run(sampler.load_weights(source, round_ + 1))
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert compiled > 0
        assert sampler.compilations == compiled
        assert not events


@pytest.mark.parametrize("changes", [{"decode_steps": 1}, {"slots": 1, "ahead": 1}, {"slots": 7, "decode_steps": 8}])
def test_settings_change_no_token(models, changes):
    requests = requests_of((1, 4, 4, 12, 30, 41), max_new_tokens=14, stop_token_ids=tuple(range(4, 12)))
    with sampler_of(models[0]) as sampler:
        want = generate(sampler, requests)
    assert {completion.finish for completion in want} == {Finish.STOP, Finish.LENGTH}
    with sampler_of(models[0], **changes) as sampler:
        for got, expected in zip(generate(sampler, requests), want, strict=True):
            np.testing.assert_array_equal(got.token_ids, expected.token_ids)
            np.testing.assert_allclose(got.logp, expected.logp, atol=BOUND)
            assert got.finish is expected.finish


def test_a_group_s_prompt_is_prefilled_once(models):
    prompt = prompt_of(40)
    requests = [Request(f"g{i}", prompt, SamplingParams(3), i) for i in range(4)]
    with sampler_of(models[0]) as sampler:
        for request, completion in zip(requests, generate(sampler, requests), strict=True):
            np.testing.assert_allclose(completion.logp, scored(models[0], request, completion), atol=BOUND)
        stats = sampler.stats()
        assert (stats.prompt_tokens, stats.prefilled_tokens, stats.generated_tokens) == (160, 39, 12)
        assert stats.running == stats.waiting == 0


def test_the_next_turn_prefills_only_what_is_new(models):
    (first,) = requests_of((20,))
    with sampler_of(models[0]) as sampler:
        (reply,) = generate(sampler, [first])
        turn = np.concatenate([first.prompt_ids, reply.token_ids, prompt_of(5)])
        request = Request("turn", turn, SamplingParams(6), 5)
        (completion,) = generate(sampler, [request])
        assert sampler.stats().prefilled_tokens == 19 + 5  # the reply's last token and four of the five; the fifth is decoded
    np.testing.assert_allclose(completion.logp, scored(models[0], request, completion), atol=BOUND)


@pytest.mark.parametrize("ahead", [0, 1])
def test_with_few_pages_every_request_gets_the_tokens_it_gets_with_many(models, ahead):
    """Some go back and are prefilled again behind their tokens."""
    requests = requests_of((1, 15, 16, 17, 30, 30, 40), max_new_tokens=34)
    requests += [Request(f"twin {i}", requests[4].prompt_ids, requests[4].params, 50 + i) for i in range(3)]
    with sampler_of(models[0]) as sampler:
        want = generate(sampler, requests)
        assert sampler.stats().preemptions == 0
    with sampler_of(models[0], cache_tokens=96, ahead=ahead) as sampler:
        for request, got, expected in zip(requests, generate(sampler, requests), want, strict=True):
            np.testing.assert_array_equal(got.token_ids, expected.token_ids)
            np.testing.assert_allclose(got.logp, scored(models[0], request, got), atol=BOUND)
        assert sampler.stats().preemptions > 0


def test_a_cancelled_request_stops_at_once(models):
    """It frees its slot and the device stops working for it; the next request finds all as it should be."""
    (long,), (short,) = requests_of((10,), max_new_tokens=48), requests_of((11,), max_new_tokens=3)
    with sampler_of(models[0]) as sampler:
        programs = sampler._programs
        plain = programs.decode

        async def cancelled():
            loop, task = asyncio.get_running_loop(), asyncio.create_task(sampler.generate(long))
            dispatched = threading.Event()

            def decode(*args):
                if not dispatched.is_set():
                    dispatched.set()
                    asyncio.run_coroutine_threadsafe(cancel(), loop).result()
                return plain(*args)

            async def cancel():
                task.cancel()

            programs.decode = decode
            with pytest.raises(asyncio.CancelledError):
                await task
            return await sampler.generate(short)

        completion = asyncio.run(cancelled())
        np.testing.assert_allclose(completion.logp, scored(models[0], short, completion), atol=BOUND)
        assert sampler.stats().generated_tokens <= 3 + 2 * 3  # a dispatch or two of the cancelled one
        assert not np.any(programs._state.active)


def swap_after(sampler, dispatches, source):
    """Loads weights between two decode dispatches of whatever runs then."""
    programs, scheduler = sampler._programs, sampler._scheduler
    plain, sent = programs.decode, []

    def decode(*args):
        sent.append(args)
        if len(sent) == dispatches:
            scheduler.command(functools.partial(scheduler.load, source, 1))
        return plain(*args)

    programs.decode = decode


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_swap_in_flight_changes_the_policy_at_one_token(models, recompute, ahead):
    """With keys and values recomputed, the tokens after it have the log-probs of the new weights over all before them."""
    (request,) = requests_of((20,), max_new_tokens=15)
    settings = {"rollout.recompute_kv_on_publish": recompute, "ahead": ahead, "decode_steps": 3}
    with sampler_of(models[0], **settings) as sampler:
        swap_after(sampler, 2, WeightsInDirectory(models[1]))
        (completion,) = generate(sampler, [request])
    old, new = (scored(model, request, completion) for model in models)
    assert completion.versions.tolist() == [0] * 6 + [1] * 9
    np.testing.assert_allclose(completion.logp[:6], old[:6], atol=BOUND)
    assert np.abs(completion.logp[6:] - old[6:]).max() > 100 * BOUND
    assert (np.abs(completion.logp[6:] - new[6:]).max() < BOUND) == recompute


def test_stale_prefix_is_not_shared_by_a_group_that_waits_through_a_swap(models):
    """More samples than slots: those that start after the swap find their prompt in rows of the old weights."""
    requests = [Request(f"g{i}", prompt_of(40), SamplingParams(6), i) for i in range(9)]
    with sampler_of(models[0]) as sampler:
        swap_after(sampler, 1, WeightsInDirectory(models[1]))
        completions = generate(sampler, requests)
    assert [set(completion.versions.tolist()) for completion in completions] == [{0, 1}] * 4 + [{1}] * 5
    for request, completion in list(zip(requests, completions, strict=True))[4:]:
        np.testing.assert_allclose(completion.logp, scored(models[1], request, completion), atol=BOUND)


def test_an_error_in_the_thread_fails_every_request_and_hangs_none(models, monkeypatch):
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    with sampler_of(models[0]) as sampler:
        broken = ValueError("out of memory, say")

        def decode(*_):
            raise broken

        sampler._programs.decode = decode

        async def ask():
            calls = [sampler.generate(request) for request in requests_of((3,) * 9)]
            return await asyncio.gather(*calls, return_exceptions=True)

        for error in asyncio.run(ask()):
            assert isinstance(error, SamplerError) and "out of memory" in str(error)
        for late in (sampler.generate(requests_of((3,))[0]), sampler.pause(), sampler.resume()):
            with pytest.raises(SamplerError, match="out of memory"):
                asyncio.run(late)
    assert raised == [broken]


def test_two_event_loops_at_once(models):
    requests = requests_of((5,) * 12)
    results = {}
    with sampler_of(models[0]) as sampler:
        want = generate(sampler, requests)
        threads = [threading.Thread(target=lambda i=i: results.update({i: generate(sampler, requests)})) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for got in results.values():
        assert [g.token_ids.tolist() for g in got] == [w.token_ids.tolist() for w in want]
    assert len(results) == 2


def test_unit_ratio_is_exact_in_the_bitwise_mode(models):
    config = config_of(**{"jax.bitwise": True, "gconfig.temperature": 0.8})
    requests = requests_of((1, 7, 30), temperature=0.8) + requests_of((4,), temperature=0.5)
    with sampler_of(models[0], bitwise=True, **{"gconfig.temperature": 0.8}) as sampler:
        scorer = scorer_of(config, ModelSpec.from_directory(models[0]), sampler._programs.mesh)
        for request, completion in zip(requests, generate(sampler, requests), strict=True):
            sequence = np.concatenate([request.prompt_ids, completion.token_ids])
            exact = scorer(hf.load(models[0])[1], [sequence])[0][len(request.prompt_ids) :]
            if request.params.temperature == 0.8:
                np.testing.assert_array_equal(completion.logp, exact)
            else:  # not what the learner scores: what sampling gave stands
                np.testing.assert_allclose(completion.logp, scored(models[0], request, completion, 0.5), atol=BOUND)


def test_closing_frees_weights_and_cache(models):
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    with sampler_of(models[0]):
        held = sum(array.nbytes for array in jax.live_arrays()) - before
        assert held > 2 * 2 * 4 * 64 * 2 * 8 * 4  # the cache alone
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) - before < held / 100


@pytest.mark.parametrize("ahead", [0, 1])
def test_memory_is_lent_and_what_was_in_flight_goes_on_under_the_weights_that_come(models, ahead):
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    (request,) = requests_of((20,), max_new_tokens=15)
    with sampler_of(models[0], ahead=ahead, decode_steps=3) as sampler:
        held = sum(array.nbytes for array in jax.live_arrays()) - before
        lent = []

        def lend():
            sampler._scheduler.release()
            gc.collect()
            lent.append(sum(array.nbytes for array in jax.live_arrays()) - before)
            sampler._scheduler.reclaim()
            sampler._scheduler.load(WeightsInDirectory(models[1]), 1)
            sampler._scheduler.resume()

        plain, sent = sampler._programs.decode, []

        def decode(*args):
            sent.append(args)
            if len(sent) == 2:
                sampler._scheduler.command(lend)
            return plain(*args)

        sampler._programs.decode = decode
        compiled = sampler.compilations
        (completion,) = generate(sampler, [request])
        assert sampler.compilations == compiled
    assert len(lent) == 1 and lent[0] < held / 10
    kept = completion.versions.tolist().count(0)
    assert completion.versions.tolist() == [0] * kept + [1] * (15 - kept) and 0 < kept < 15
    old, new = (scored(model, request, completion) for model in models)
    np.testing.assert_allclose(completion.logp, np.concatenate([old[:kept], new[kept:]]), atol=BOUND)


def test_what_a_request_cannot_ask(models):
    good = SamplingParams(4)
    with sampler_of(models[0]) as sampler:
        for prompt, params, culprit in (
            ([5, VOCABULARY], good, "outside the vocabulary"),
            ([-1, 5], good, "outside the vocabulary"),
            ([5], SamplingParams(4, stop_token_ids=tuple(range(40))), "stop_token_ids"),
        ):
            with pytest.raises(UserError, match=culprit):
                generate(sampler, [Request("bad", np.asarray(prompt, np.int32), params, 0)])
        with pytest.raises(UserError, match="merged first"):
            asyncio.run(sampler.load_weights(WeightsInMemory({"layers": {}}), 1))
        assert sampler.version == 0


def test_a_kernel_that_cannot_run_here_is_refused(models):
    with pytest.raises(UserError, match=r"jax\.decode_attention=pallas_gpu: it needs an NVIDIA GPU"):
        JaxSampler(config_of(**{"jax.decode_attention": "pallas_gpu"}), Pool("jax"), models[0])


def test_a_cache_without_room_for_one_request_is_refused(models):
    with pytest.raises(UserError, match=r"jax\.cache_tokens: 63 tokens, .* needs 64 \(4 pages of 16"):
        JaxSampler(config_of(**{"jax.cache_tokens": 63}), Pool("jax"), models[0])


def test_what_a_pool_cannot_be(models):
    with pytest.raises(UserError, match="devices"):
        JaxSampler(config_of(), Pool("jax", data=64), models[0])


MESH_REQUESTS = ((1, 4, 4, 12, 30, 41, 41),), {"max_new_tokens": 10, "stop_token_ids": (4, 5, 6, 7)}
MESHES = """
import asyncio, json, sys
from pathlib import Path
import numpy as np
from rljax.config.allocation import Pool
from rljax.engine import WeightsInDirectory, WeightsInMemory
from rljax.errors import UserError
from rljax.engines.jax.sampling.sampler import JaxSampler
from rljax.testing.models import config_of
from tests.unit.engines.jax.sampling.test_jax_sampler import MESH_REQUESTS, generate, requests_of

first, second = map(Path, sys.argv[1:])
requests = requests_of(*MESH_REQUESTS[0], **MESH_REQUESTS[1])
results = []
for pool in (Pool("jax", data=2, tensor=2, first_device=1), Pool("jax", fsdp=2, tensor=4)):
    sampler = JaxSampler(config_of(**{"jax.prefill_chunk": 16}), pool, first)
    compiled = sampler.compilations
    completions = generate(sampler, requests)
    asyncio.run(sampler.load_weights(WeightsInDirectory(second), 1))
    completions += generate(sampler, requests)
    results.append([(c.token_ids.tolist(), c.logp.tolist(), c.versions.tolist()) for c in completions])
    assert sampler.compilations == compiled, (pool, compiled, sampler.compilations)
    asyncio.run(sampler.close())
try:
    JaxSampler(config_of(**{"jax.slots": 3}), Pool("jax", data=2), first)
except UserError as error:
    assert "jax.slots" in str(error)
else:
    raise AssertionError("3 slots over d2")
print(json.dumps(results))
"""


def test_meshes_of_eight_devices_give_the_tokens_of_one(models):
    root = Path(__file__).resolve().parents[5]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, "-c", MESHES, *map(str, models)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    requests = requests_of(*MESH_REQUESTS[0], **MESH_REQUESTS[1])
    with sampler_of(models[0]) as sampler:
        want = generate(sampler, requests)
        asyncio.run(sampler.load_weights(WeightsInDirectory(models[1]), 1))
        want += generate(sampler, requests)
    for completions in json.loads(done.stdout.splitlines()[-1]):
        for (tokens, logp, versions), one in zip(completions, want, strict=True):
            assert (tokens, versions) == (one.token_ids.tolist(), one.versions.tolist())
            np.testing.assert_allclose(logp, one.logp, atol=BOUND)
