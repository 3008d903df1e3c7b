"""Servers that go and come: what waits for them, and which weights they have afterwards."""

from __future__ import annotations

import asyncio
import time

import pytest

from rljax.engine import WeightsBroadcast, WeightsInDirectory
from rljax.engines.http import health
from rljax.engines.http.plugin import sampler_of
from rljax.engines.http.remote import Remote
from rljax.errors import SamplerError, UserError
from rljax.testing.harness import make_config
from rljax.testing.sampler_contract import publish
from tests.unit.engines.http.clients import PROMPT, is_whole, request, with_servers
from tests.unit.engines.http.scripted import SGLANG_17, ScriptedServer, client_of, continuation

pytestmark = pytest.mark.usefixtures("impatient")


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
