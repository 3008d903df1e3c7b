"""The client: requests against servers that break off, abort, refuse and hang."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest
from aiohttp import web

from rljax.engines.http import remote as remote_module
from rljax.engines.http.continuation import remaining
from rljax.engines.http.remote import Remote
from rljax.errors import RequestLost, SamplerError, UserError
from rljax.rollout.producer import RetryingGenerator
from rljax.types import Completion, Finish
from tests.unit.engines.http.clients import PROMPT, is_whole, request, with_servers
from tests.unit.engines.http.scripted import CONTEXT, SGLANG_17, ScriptedServer, client_of, continuation

pytestmark = pytest.mark.usefixtures("impatient")


def break_at(token: int, times: int = 1):
    """Returns a script that breaks a stream off before a token, `times` times."""
    left = [times]

    def script(server: ScriptedServer, at: int):
        if at == token and left[0]:
            left[0] -= 1
            return "break"
        return None

    return script


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
