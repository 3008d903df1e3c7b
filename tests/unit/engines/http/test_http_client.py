"""The client against servers that break off, abort, refuse, hang and come back."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time

import numpy as np
import pytest
from aiohttp import web

from rljax.engine import WeightsBroadcast, WeightsInDirectory
from rljax.engines.http import client as client_module
from rljax.engines.http import health
from rljax.engines.http import remote as remote_module
from rljax.engines.http.continuation import remaining
from rljax.engines.http.plugin import sampler_of
from rljax.engines.http.remote import Remote
from rljax.errors import RequestLost, SamplerError, UserError
from rljax.rollout.producer import RetryingGenerator
from rljax.testing.harness import make_config
from rljax.testing.sampler_contract import publish
from rljax.types import Completion, Finish, Request, SamplingParams
from tests.unit.engines.http.scripted import CONTEXT, SGLANG_17, SGLANG_23, ScriptedServer, client_of, continuation

PROMPT = [5, 6, 7]


def request(name: str = "0/1#0", prompt=PROMPT, **params) -> Request:
    return Request(name, np.array(prompt, np.int32), SamplingParams(**({"max_new_tokens": 12} | params)), seed=9)


def with_servers(count: int):
    """Runs a coroutine test with started servers, and stops them in any case."""

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            async def body() -> None:
                servers = [ScriptedServer() for _ in range(count)]
                for server in servers:
                    await server.start()
                try:
                    async with asyncio.timeout(30):
                        await test(*servers, **fixtures)
                finally:
                    for server in servers:
                        await server.stop()

            asyncio.run(body())

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[count:])
        del run.__wrapped__
        return run

    return decorate


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(health, "INTERVAL", 0.05)


def break_at(token: int, times: int = 1):
    """Returns a script that breaks a stream off before a token, `times` times."""
    left = [times]

    def script(server: ScriptedServer, at: int):
        if at == token and left[0]:
            left[0] -= 1
            return "break"
        return None

    return script


def is_whole(completion: Completion, count: int = 12, prompt=PROMPT) -> None:
    want = continuation(prompt, count)
    assert completion.token_ids.tolist() == want
    np.testing.assert_allclose(completion.logp, -np.array(want) / 1000, rtol=1e-6)
    assert completion.finish is Finish.LENGTH


@pytest.mark.parametrize("incremental", [False, True])
@with_servers(1)
async def test_cumulative_and_incremental_streams_give_one_completion(server, incremental):
    server.incremental = incremental
    sampler = client_of(server)
    is_whole(await sampler.generate(request()))
    await sampler.close()


def test_no_request_goes_out_on_a_connection_that_the_server_is_about_to_close(monkeypatch):
    """A request may cross the server's close of an idle connection, as if the server had died."""
    monkeypatch.setattr(remote_module, "SERVERS_KEEP", 0.4)
    connections = []

    async def serve(reader, writer):
        connections.append(writer)
        answered = time.monotonic()
        while await reader.readline():
            while (line := await reader.readline()).strip():
                if line.lower().startswith(b"content-length"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            if time.monotonic() - answered > remote_module.SERVERS_KEEP:
                break
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            answered = time.monotonic()
        writer.close()

    async def body():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        remote = Remote(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", SGLANG_17, None)
        async with server, remote_module.make_session() as session:
            for pause in (0, 0, 2 * remote_module.SERVERS_KEEP):
                await asyncio.sleep(pause)
                assert await remote.post(session, "/continue_generation", {}, 10) == {}
        assert len(connections) == 2  # and one that is in use is used again

    asyncio.run(body())


@with_servers(2)
async def test_a_broken_stream_goes_on_at_another_server_behind_its_tokens(one, two):
    one.script = break_at(5)
    sampler = client_of(one, two)
    is_whole(await sampler.generate(request()))
    (first,), (second,) = one.bodies, two.bodies
    assert second["input_ids"] == PROMPT + continuation(PROMPT, 5)
    assert second["sampling_params"]["max_new_tokens"] == 7
    assert first["rid"] != second["rid"]
    assert first["sampling_params"]["sampling_seed"] != second["sampling_params"]["sampling_seed"]
    await sampler.close()


@with_servers(1)
async def test_the_only_server_is_waited_for(server):
    server.script = break_at(5)
    sampler = client_of(server)
    is_whole(await sampler.generate(request()))
    await sampler.close()


@with_servers(1)
async def test_attempts_without_a_token_are_counted_and_then_the_request_is_lost(server):
    server.script = lambda _, at: web.json_response({"detail": "busy"}, status=503) if at == -1 else None
    sampler = client_of(server, request_retries=2)
    with pytest.raises(SamplerError, match="busy"):
        await sampler.generate(request())
    assert len(server.bodies) == 3
    await sampler.close()


@pytest.mark.parametrize("harm", ["abort", "break"])
@with_servers(1)
async def test_nested_retries_are_not_multiplied_at_a_server(server, harm):
    """A server that aborts or breaks off each attempt gets 1 + request_retries requests, not more."""
    server.script = lambda _, at: harm
    lost = []
    sampler = client_of(server, request_retries=3)
    patient = RetryingGenerator(sampler, timeout=60.0, retries=3, lost=lost.append)
    with pytest.raises(RequestLost, match="lost after 4 attempts"):
        await patient.generate(request())
    assert len(server.bodies) == 4 and len(lost) == 1
    await sampler.close()


@with_servers(1)
async def test_attempts_that_bring_tokens_do_not_count(server):
    server.script = lambda _, at: "break" if at == 1 else None  # a token an attempt
    sampler = client_of(server, request_retries=0)
    is_whole(await sampler.generate(request(max_new_tokens=6)), 6)
    assert len(server.bodies) == 6
    await sampler.close()


@with_servers(1)
async def test_an_abort_by_somebody_else_is_submitted_again(server):
    left = ["abort"]
    server.script = lambda _, at: left.pop() if at == 4 and left else None
    sampler = client_of(server)
    is_whole(await sampler.generate(request()))
    assert len(server.bodies) == 2
    await sampler.close()


@with_servers(1)
async def test_a_refused_request_is_the_callers_error_and_not_repeated(server):
    body = {"error": {"message": "max_new_tokens is odd"}}
    server.script = lambda _, at: web.json_response(body, status=400) if at == -1 else None
    sampler = client_of(server)
    with pytest.raises(UserError, match="max_new_tokens is odd"):
        await sampler.generate(request())
    assert len(server.bodies) == 1
    await sampler.close()


@with_servers(1)
async def test_a_request_that_takes_too_long_is_lost_and_aborted(server):
    server.step = 5.0
    sampler = client_of(server)
    patient = RetryingGenerator(sampler, timeout=0.2, retries=3, lost=lambda error: None)
    with pytest.raises(SamplerError, match=r"rollout\.request_timeout"):
        await patient.generate(request())
    assert len(server.bodies) == 1  # the time is up for all attempts together
    while not any(name == "abort_request" for name, _ in server.calls):
        await asyncio.sleep(0.01)
    assert server.calls[-1][1] == {"rid": server.bodies[0]["rid"]}
    await sampler.close()


@with_servers(2)
async def test_samples_of_a_prompt_go_to_one_server_and_prompts_to_all(one, two):
    for server in (one, two):
        server.step = 0.01
    sampler = client_of(one, two)
    groups = [[request(f"0/{g}#{i}", [g + 1, 2, 3]) for i in range(4)] for g in range(4)]
    await asyncio.gather(*(sampler.generate(r) for group in groups for r in group))
    assert len(one.bodies) == len(two.bodies) == 8
    homes = [{server.base for server in (one, two) for b in server.bodies if b["input_ids"][0] == g + 1} for g in range(4)]
    assert all(len(home) == 1 for home in homes)
    await sampler.close()


@with_servers(2)
async def test_a_group_overflows_when_its_server_is_far_busier(one, two):
    for server in (one, two):
        server.step = 0.01
    sampler = client_of(one, two)
    await asyncio.gather(*(sampler.generate(request(f"0/0#{i}")) for i in range(40)))
    assert min(len(one.bodies), len(two.bodies)) >= 10
    await sampler.close()


@with_servers(1)
async def test_a_prompt_is_checked_against_vocabulary_and_context_before_it_is_sent(server):
    """SGLang on the CPU dies of an id outside the vocabulary, and refuses too long a prompt."""
    sampler = client_of(server)
    for prompt in ([3, 1000], [-1], [], [1] * CONTEXT):
        with pytest.raises(UserError):
            await sampler.generate(request(prompt=prompt))
    assert not server.bodies
    full = await sampler.generate(request(prompt=[1] * (CONTEXT - 3), max_new_tokens=100))
    is_whole(full, 3, [1] * (CONTEXT - 3))
    await sampler.close()


@with_servers(1)
async def test_the_token_is_sent(server):
    sampler = client_of(server, token="secret")
    await sampler.generate(request())
    assert server.headers == ["Bearer secret"]
    await sampler.close()


# Versions


async def swapped(server: ScriptedServer, sampler, tmp_path, at: int, count: int = 24) -> Completion:
    """Publishes after the server has sampled `at` tokens of a completion."""
    reached = asyncio.Event()
    server.script = lambda _, token: reached.set() if token == at else None
    server.step = 0.005
    task = asyncio.create_task(sampler.generate(request(max_new_tokens=count)))
    await reached.wait()
    await publish(sampler, WeightsInDirectory(tmp_path), 1)
    return await task


@pytest.mark.parametrize("info", [SGLANG_23, SGLANG_17], ids=["spans", "labels"])
@with_servers(1)
async def test_a_swap_under_a_request_is_seen_at_its_token(server, tmp_path, info):
    server.spans = info is SGLANG_23
    sampler = client_of(server, info=info)
    completion = await swapped(server, sampler, tmp_path, at=8)
    is_whole(completion, 24)
    old = int((completion.versions == 0).sum())
    # Spans are exact; a first label under new weights is held to be late by one chunk, here one token.
    assert 8 <= old - (info is SGLANG_17) <= 10
    assert np.all(np.diff(completion.versions) >= 0) and completion.versions[-1] == 1
    await sampler.close()


@with_servers(1)
async def test_a_label_read_after_the_reply_never_makes_a_token_younger(server, tmp_path):
    """An old server's front end knows of new weights before the tokens of the old ones pass it."""
    early = [False]
    server.relabel = lambda version: 1 if early[0] else version
    sampler = client_of(server)

    def script(_, token):
        early[0] = early[0] or token == 11  # token 11, made by version 0, is labeled 1

    server.script = script
    completion = await sampler.generate(request())
    assert completion.versions.tolist() == [0] * 12
    await sampler.close()


@with_servers(1)
async def test_requests_use_a_cache_of_their_weights_and_of_their_run_alone(server, tmp_path):
    """No stale cache at a server that keeps the cache of older weights for requests in flight."""
    sampler, another_run = client_of(server), client_of(server)
    await sampler.generate(request())
    await publish(sampler, WeightsInDirectory(tmp_path), 1)
    await sampler.generate(request())
    await another_run.generate(request())
    await publish(sampler, WeightsInDirectory(tmp_path), 1)  # again: what was cached before may be of other weights
    await sampler.generate(request())
    assert len({body["extra_key"] for body in server.bodies}) == 4
    await sampler.close()
    await another_run.close()


@pytest.mark.parametrize(
    ("recompute", "info", "mode"), [(False, SGLANG_17, "in_place"), (True, SGLANG_23, "retract"), (True, SGLANG_17, "abort")]
)
@with_servers(1)
async def test_recomputing_retracts_or_aborts_and_submits_again(server, tmp_path, recompute, info, mode):
    sampler = client_of(server, info=info, recompute=recompute)
    completion = await swapped(server, sampler, tmp_path, at=6)
    is_whole(completion, 24)
    assert ("pause_generation", {"mode": mode}) in server.calls
    (loaded,) = [body for name, body in server.calls if name == "update_weights_from_disk"]
    assert loaded["flush_cache"] == (mode == "retract")  # SGLang 0.5.17 dies of a flush with requests in its queue
    assert len(server.bodies) == (2 if mode == "abort" else 1)
    if mode == "abort":
        kept = len(server.bodies[1]["input_ids"]) - len(PROMPT)
        assert completion.versions.tolist() == [0] * kept + [1] * (24 - kept)
    await sampler.close()


@with_servers(1)
async def test_memory_is_released_with_nothing_running_and_back_before_weights_come(server, tmp_path):
    """A request in flight is aborted first, for SGLang would die of it.

    The request continues behind its tokens, under the next weights.
    """
    sampler = client_of(server, lends=True)
    reached = asyncio.Event()
    server.script = lambda _, token: reached.set() if token == 6 else None
    server.step = 0.005
    task = asyncio.create_task(sampler.generate(request(max_new_tokens=24)))
    await reached.wait()
    await sampler.release()
    await sampler.reclaim()
    await publish(sampler, WeightsInDirectory(tmp_path), 1)
    completion = await task
    is_whole(completion, 24)
    assert set(completion.versions) == {0, 1}
    lent = {"tags": ["kv_cache", "weights"]}
    assert [(name, body) for name, body in server.calls if "memory" in name] == [
        ("release_memory_occupation", lent),
        ("resume_memory_occupation", lent),
    ]
    names = [name for name, body in server.calls if body != {"mode": "in_place"}]
    assert names[:3] == ["pause_generation", "release_memory_occupation", "resume_memory_occupation"]
    assert names.index("resume_memory_occupation") < names.index("update_weights_from_disk")
    await sampler.close()


@pytest.mark.parametrize("recompute", [False, True])
@with_servers(1)
async def test_the_config_decides_whether_caches_are_recomputed(server, tmp_path, recompute):
    remotes = [Remote(server.base, SGLANG_23, None)]
    sampler = sampler_of(make_config({"rollout.recompute_kv_on_publish": recompute}), remotes, 0)
    await publish(sampler, WeightsInDirectory(tmp_path), 1)
    assert ("pause_generation", {"mode": "retract" if recompute else "in_place"}) in server.calls
    await sampler.close()


# Servers that go and come


@with_servers(2)
async def test_a_server_that_refuses_weights_is_left_out_until_it_takes_them(one, two, tmp_path):
    (tmp_path / "weights").mkdir()
    two.refuse_load = True
    sampler = client_of(one, two)
    await publish(sampler, WeightsInDirectory(tmp_path / "weights"), 1)
    await asyncio.gather(*(sampler.generate(request(f"{i}#0")) for i in range(4)))
    assert len(one.bodies) == 4 and not two.bodies
    two.refuse_load = False  # the watch brings it back with the weights it holds
    while not sampler._remotes[1].usable:
        await asyncio.sleep(0.01)
    assert two.version == 1
    await asyncio.gather(*(sampler.generate(request(f"new {i}#0")) for i in range(4)))
    assert two.bodies
    await sampler.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("held-")]


@with_servers(1)
async def test_weights_that_every_server_refuses_are_the_callers_error(server, tmp_path):
    server.refuse_load = True
    sampler = client_of(server)
    with pytest.raises(UserError, match="no such tensor"):
        await publish(sampler, WeightsInDirectory(tmp_path), 1)
    assert sampler.version == 0
    is_whole(await sampler.generate(request()))
    await sampler.close()


@with_servers(1)
async def test_a_server_that_comes_back_with_old_weights_gets_the_present_ones_first(server, tmp_path):
    (tmp_path / "1").mkdir()
    sampler = client_of(server)
    await publish(sampler, WeightsInDirectory(tmp_path / "1"), 1)
    (tmp_path / "1").rmdir()  # as publishers do
    port = int(server.base.rpartition(":")[2])
    await server.stop()
    waiting = asyncio.create_task(sampler.generate(request()))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    again = ScriptedServer()
    await again.start(port)
    try:
        completion = await waiting
        is_whole(completion)
        assert set(completion.versions) == {1} and again.version == 1
    finally:
        await again.stop()
        await sampler.close()


@with_servers(1)
async def test_weights_that_are_published_twice_are_held_still(server, tmp_path):
    sampler = client_of(server)
    for _ in range(2):
        (tmp_path / "1").mkdir()
        await publish(sampler, WeightsInDirectory(tmp_path / "1"), 1)
        (tmp_path / "1").rmdir()
    assert sampler.present_weights() is not None
    await sampler.close()
    assert not list(tmp_path.iterdir())


class Received:
    """A broadcast that records the servers it is sent to, in order."""

    def __init__(self):
        self.members = []

    async def send(self, posts, version, *, flush):
        self.members.append([post.remote.base for post in posts])


@with_servers(3)
async def test_servers_take_part_in_their_order_also_when_one_was_started_again(one, two, three):
    """The k-th server gets the memory of the k-th device by ipc."""
    servers, received = (one, two, three), Received()
    sampler = client_of(*servers)
    for lagging in range(3):
        remote = sampler._remotes[lagging]
        remote.usable, remote.behind = False, True
        await publish(sampler, WeightsBroadcast(received), lagging + 1)
        assert remote.usable
    assert received.members == [[server.base for server in servers]] * 3
    await sampler.close()


@with_servers(1)
async def test_a_server_that_swallows_requests_keeps_no_publish_waiting(server, tmp_path):
    """The watch checks such a server again and again, and waits for an answer each time."""
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0)
    async with silent:
        there = Remote(server.base, SGLANG_17, None)
        mute = Remote(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", SGLANG_17, None)
        mute.lost("has gone quiet")
        sampler = sampler_of(make_config(), [there, mute], 0)
        await sampler.generate(request())
        await asyncio.sleep(4 * health.INTERVAL)  # it is being asked
        async with asyncio.timeout(5):
            await publish(sampler, WeightsInDirectory(tmp_path), 1)
        assert server.version == 1
        await sampler.close()


@with_servers(1)
async def test_a_server_that_stays_away_is_dropped_and_requests_fail(server, monkeypatch):
    monkeypatch.setattr(health, "PATIENCE", 0.2)
    sampler = client_of(server)
    await server.stop()
    with pytest.raises(SamplerError):
        await sampler.generate(request())
    with pytest.raises(SamplerError, match="no server is left"):
        await sampler.pause()
    await sampler.close()


@with_servers(1)
async def test_a_publish_while_the_only_server_is_away_waits_for_it_with_the_weights(server, tmp_path):
    (tmp_path / "1").mkdir()
    sampler = client_of(server)
    await sampler.generate(request())
    port = int(server.base.rpartition(":")[2])
    await server.stop()
    await publish(sampler, WeightsInDirectory(tmp_path / "1"), 1)
    again = ScriptedServer()
    await again.start(port)
    try:
        assert set((await sampler.generate(request())).versions) == {1}
    finally:
        await again.stop()
        await sampler.close()


def stopped_at(token: int):
    """Returns a script that stops a server, as SIGSTOP does, before a token: it accepts and never answers."""
    return lambda server, at: server.silent.add("*") if at == token else None


@with_servers(2)
async def test_what_a_silent_server_had_goes_elsewhere_when_it_is_lost(one, two, monkeypatch):
    """No request timeout is needed for that: requests, and the tokens that came, are given up to others at once."""
    monkeypatch.setattr(health, "CHECK_TIMEOUT", 0.05)
    one.script = stopped_at(5)
    sampler = client_of(one, two)
    is_whole(await sampler.generate(request()))
    assert two.bodies[0]["input_ids"] == PROMPT + continuation(PROMPT, 5)
    one.silent.clear()
    await sampler.close()


@pytest.mark.parametrize("call", ["pause_generation", "get_server_info", "update_weights_from_disk", "continue_generation"])
@with_servers(2)
async def test_a_publish_waits_for_no_server_that_is_lost(one, two, tmp_path, monkeypatch, call):
    """The server falls silent in the middle of the publish, which goes on when the watch calls it lost."""
    monkeypatch.setattr(health, "CHECK_TIMEOUT", 0.05)
    sampler = client_of(one, two)
    await sampler.generate(request())
    one.silent = {call, "get_model_info"}
    await publish(sampler, WeightsInDirectory(tmp_path), 1)
    assert two.version == sampler.version == 1
    is_whole(await sampler.generate(request("0/2#0")))
    one.silent.clear()
    await sampler.close()


@with_servers(2)
async def test_a_pause_waits_for_no_server_that_is_being_brought_back(one, two, tmp_path):
    (tmp_path / "1").mkdir()
    sampler = client_of(one, two)
    one.refuse_load = True
    await publish(sampler, WeightsInDirectory(tmp_path / "1"), 1)
    one.refuse_load, one.silent = False, {"update_weights_from_disk"}  # it answers checks, and loads for ever
    while not sampler.control.locked():
        await asyncio.sleep(0.01)
    await publish(sampler, WeightsInDirectory(tmp_path / "1"), 2)
    assert (one.version, two.version) == (0, 2)
    one.silent.clear()
    while one.version != 2:
        await asyncio.sleep(0.01)
    await sampler.close()


@pytest.mark.parametrize(
    "body", [[], "fine", {"status": "ok"}, {"weight_version": "mine"}], ids=["list", "text", "other", "name"]
)
@with_servers(2)
async def test_checks_go_on_after_another_program_answered_one(one, two, body):
    sampler = client_of(one, two)
    await sampler.generate(request())
    home, other = (one, two) if one.bodies else (two, one)
    home.info_body = body
    while len(other.bodies) < 1:  # once it counts as lost, requests go to the other
        await sampler.generate(request())
    home.info_body, before = None, len(home.bodies)
    while len(home.bodies) == before:
        await sampler.generate(request(f"{time.monotonic()}#0"))
    await sampler.close()


@with_servers(2)
async def test_a_fault_of_ours_in_a_check_costs_its_server_alone(one, two, monkeypatch):
    version_at, faulty = health.Watch._version_at, {one.base}

    async def breaks(self, remote):
        if remote.base in faulty:
            raise ArithmeticError("a fault of ours")
        return await version_at(self, remote)

    monkeypatch.setattr(health.Watch, "_version_at", breaks)
    sampler = client_of(one, two)
    await sampler.generate(request())
    while sampler._remotes[0].usable:
        await asyncio.sleep(0.01)
    is_whole(await sampler.generate(request("by the other#0")))
    faulty.clear()
    while not sampler._remotes[0].usable:  # it is still checked
        await asyncio.sleep(0.01)
    await sampler.close()


@with_servers(1)
async def test_the_end_of_the_watch_is_an_error_of_every_request(server, monkeypatch):
    """Without it a lost server would be waited for in silence."""

    async def breaks(self, index):
        raise ArithmeticError("a fault of ours")

    monkeypatch.setattr(health.Watch, "_check_one", breaks)
    server.silent.add("generate")
    sampler = client_of(server)
    with pytest.raises(SamplerError, match="watch over the servers ended: ArithmeticError: a fault of ours"):
        await sampler.generate(request())
    server.silent.clear()
    await sampler.close()


@with_servers(1)
async def test_closing_keeps_tokens_and_lets_a_paused_server_go_on(server):
    server.step, sampled = 0.005, asyncio.Event()
    server.script = lambda _, tokens: sampled.set() if tokens > 0 else None
    sampler = client_of(server)
    task = asyncio.create_task(sampler.generate(request(max_new_tokens=200)))
    await sampled.wait()
    await sampler.pause()
    await sampler.close()
    completion = await task
    assert completion.finish is Finish.ABORT and 0 < len(completion.token_ids) < 200
    assert completion.token_ids.tolist() == continuation(PROMPT, len(completion.token_ids))
    assert server.calls[-1][0] == "continue_generation"


def test_what_remains_drops_the_tokens_a_stop_string_may_have_begun_in():
    done = Completion(np.arange(10, dtype=np.int32), np.zeros(10, np.float32), np.zeros(10, np.int32), Finish.ABORT)
    rest = remaining(request(max_new_tokens=20, min_new_tokens=9, stop=("abc", "é")), done)
    assert rest.prompt_ids.tolist() == [*PROMPT, *range(8)]  # "abc" may have begun in the last two
    assert (rest.params.max_new_tokens, rest.params.min_new_tokens) == (12, 1)
    assert remaining(request(max_new_tokens=10), done) is None
    start_over = request(max_new_tokens=20, stop=("x" * 40,))
    assert remaining(start_over, done) is start_over


def test_a_request_body_is_what_sglang_takes():
    from rljax.engines.http.protocol import generate_body

    body = generate_body(request(greedy=True, top_p=0.5, top_k=7, stop_token_ids=(2,), stop=("\n",)), cache_key="k")
    assert json.loads(json.dumps(body)) == body
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.0, 1.0, -1)
    assert sampling["stop_token_ids"] == [2] and sampling["stop"] == ["\n"] and not sampling["ignore_eos"]
