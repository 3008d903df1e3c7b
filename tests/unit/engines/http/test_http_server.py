"""Our server: its answers, its access control, and its owners."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from rljax.engines.http import access, client
from rljax.engines.http.access import weight_directory
from rljax.engines.http.plugin import attach
from rljax.engines.http.protocol import BadRequest, parse_json
from rljax.engines.http.remote import OWNER
from rljax.engines.http.server import UNSUPPORTED, is_loopback
from rljax.errors import SamplerError, UserError
from rljax.messaging import web_server
from rljax.testing.harness import make_config
from tests.unit.engines.http.served import ANSWER, GENERATE, Served


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(ANSWER):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_whole_reply_has_sglangs_fields(served):
    status, text = served.post("/generate", GENERATE)
    reply = json.loads(text)
    meta = reply["meta_info"]
    assert status == 200 and reply["output_ids"] == [1, 2, 3]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (2, 3, "0")
    assert meta["output_token_logprobs"] == [[0.0, 1, None], [0.0, 2, None], [0.0, 3, None]]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]


def test_memory_is_released_by_a_sampler_that_can_and_only_while_nothing_runs(served):
    memory = ("/release_memory_occupation", "/resume_memory_occupation")
    assert [served.post(path, {})[0] for path in memory] == [200, 200]  # this one can't, and nothing happens
    done = []

    async def noted(what: str) -> None:
        done.append(what)

    for name in ("release", "reclaim"):
        setattr(served.sampler, name, functools.partial(noted, name))
    served.sampler.lends = False  # the client's config decides, not the server's
    assert [served.post(path, {"tags": ["weights", "kv_cache"]})[0] for path in memory] == [200, 200]
    assert done == ["release", "reclaim"]
    for body in ({"tags": ["everything"]}, {"tags": "weights"}, {"tags": [["weights"]]}):
        assert served.post(memory[0], body)[0] == 400
    served.sampler.step = 0.05

    async def generate() -> None:
        async with served.session.post(served.base + "/generate", json=GENERATE) as response:
            await response.read()

    under_way = served.loop.start(generate())
    while not served.sampler.under_way:
        pass
    assert "under way" in served.post(memory[0], {})[1]
    under_way.result(ANSWER)
    assert done == ["release", "reclaim"]


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_brings_the_same_in_chunks(served, incremental):
    _, text = served.post("/generate", GENERATE | {"stream": True, "incremental": incremental})
    *chunks, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    ids = [json.loads(chunk)["output_ids"] for chunk in chunks]
    assert ([i for some in ids for i in some] if incremental else ids[-1]) == [1, 2, 3]
    finishes = [json.loads(chunk)["meta_info"]["finish_reason"] for chunk in chunks]
    assert finishes[-1]["type"] == "length" and not any(finishes[:-1])


def test_a_swap_under_a_stream_shows_at_its_token(served, weights):
    served.sampler.step = 0.01

    async def swap() -> list[dict[str, Any]]:
        chunks = []
        body = GENERATE | {"stream": True, "sampling_params": {"max_new_tokens": 20}}
        async with served.session.post(served.base + "/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunks.append(json.loads(line[6:]))
                if len(chunks) == 5:
                    for path, sent in (
                        ("/pause_generation", {"mode": "in_place"}),
                        ("/update_weights_from_disk", {"model_path": str(weights / "7"), "weight_version": "4"}),
                        ("/continue_generation", {}),
                    ):
                        async with served.session.post(served.base + path, json=sent) as answer:
                            assert answer.status == 200
        return chunks

    last = served.loop.run(swap())[-1]
    first, second = last["meta_info"]["weight_versions"]
    assert (first["version"], second["version"]) == ("0", "4") and 5 <= first["end"] == second["start"] < 20
    by_version = [0.0] * first["end"] + [-4.0] * (20 - first["end"])
    assert [entry[0] for entry in last["meta_info"]["output_token_logprobs"]] == by_version


def test_an_abort_keeps_the_tokens_so_far(served):
    served.sampler.step = 0.01

    async def abort() -> dict[str, Any]:
        body = GENERATE | {"rid": "a", "sampling_params": {"max_new_tokens": 90}}
        task = asyncio.ensure_future(served.session.post(served.base + "/generate", json=body))
        async with asyncio.timeout(ANSWER):
            await served.sampler.taken.wait()
        async with served.session.post(served.base + "/abort_request", json={"rid": "no prefix of a"}):
            pass
        async with served.session.post(served.base + "/abort_request", json={"rid": "a"}):
            pass
        async with await task as response:
            return await response.json()

    reply = served.loop.run(abort())
    assert reply["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(reply["output_ids"]) < 90
    assert served.sampler.under_way == 0


def test_a_client_that_leaves_frees_its_slot(served):
    served.sampler.step = 0.01

    async def leave() -> None:
        for stream in (False, True):
            body = GENERATE | {"sampling_params": {"max_new_tokens": 90}, "stream": stream}
            task = asyncio.ensure_future(served.session.post(served.base + "/generate", json=body))
            await until(lambda: served.sampler.under_way == 1)
            if task.done():
                task.result().close()
            task.cancel()
            await until(lambda: served.sampler.under_way == 0)

    served.loop.run(leave())


@pytest.mark.parametrize("half", [rb"\ud800", rb"\uDFFF", rb"\udc00\ud800", b"\xed\xa0\x80"])
@pytest.mark.parametrize("body", [b'{"text": "%s"}', b'{"input_ids": [1], "rid": "%s"}', b'{"text": "a", "%s": 1}'])
def test_half_of_a_character_is_refused_wherever_it_stands(half, body):
    with pytest.raises(BadRequest, match="half of a surrogate pair"):
        parse_json(body % half)


def test_a_pair_of_halves_is_a_character():
    assert parse_json(rb'{"text": "\ud83d\ude00 \\ud800"}') == {"text": "\U0001f600 \\ud800"}


def test_a_sampler_that_fails_is_a_503_and_a_refusal_a_400(served):
    for error, want in ((SamplerError("it died"), 503), (UserError("no room"), 400)):
        served.sampler.broken = error
        for stream in (False, True):
            status, text = served.post("/generate", GENERATE | {"stream": stream})
            assert status == want and str(error) in text


def test_too_many_requests_are_turned_away(weights):
    with contextlib.closing(Served(weights, max_requests=2)) as served:
        served.sampler.running.clear()

        async def flood() -> list[int]:
            tasks = [asyncio.ensure_future(served.session.post(served.base + "/generate", json=GENERATE)) for _ in range(5)]
            await until(lambda: sum(task.done() for task in tasks) == 3)
            served.sampler.running.set()
            return sorted([(await task).status for task in tasks])

        assert served.loop.run(flood()) == [200, 200, 503, 503, 503]


def test_a_body_past_the_limit_is_refused(weights):
    with contextlib.closing(Served(weights, max_body=1000)) as served:
        assert served.post("/generate", GENERATE | {"input_ids": [1] * 1000})[0] == 413
        assert served.post("/generate", GENERATE)[0] == 200


def test_a_connection_is_a_strangers_until_a_request_has_the_token(weights):
    right, wrong = {"Authorization": "Bearer sesame"}, {"Authorization": "Bearer open"}
    asked = [
        ("/health", {}),
        ("/get_model_info", {}),
        ("/get_model_info", wrong),
        ("/health", right),
        ("/get_model_info", right),
    ]
    with contextlib.closing(Served(weights, token="sesame")) as served:
        for path, headers in asked:

            async def ask(path: str, headers: dict[str, str]) -> int:
                async with aiohttp.ClientSession() as session:  # a connection of its own, which stays open for now
                    async with session.get(served.base + path, headers=headers) as response:
                        await response.read()
                    return served.server._server.strangers

            assert served.loop.run(ask(path, headers)) == (0 if headers == right else 1), (path, headers)
            served.loop.run(until(lambda: served.server._server.strangers == 0))


def test_silent_strangers_keep_no_client_out(weights, monkeypatch):
    monkeypatch.setattr(web_server, "TURN", 0.002)
    with contextlib.closing(Served(weights, token="sesame")) as served, contextlib.ExitStack() as stack:
        for _ in range(3 * web_server.MAX_STRANGERS):
            stack.enter_context(socket.create_connection(served.address))
        assert served.post("/generate", GENERATE, headers={"Authorization": "Bearer sesame"})[0] == 200
        assert served.server._server.strangers <= web_server.MAX_STRANGERS


def test_a_token_guards_everything_but_the_probes(weights):
    with contextlib.closing(Served(weights, token="sesame")) as served:
        for route in served.server.application().router.routes():
            path = route.resource.canonical
            for headers in ({}, {"Authorization": "Bearer Sesame"}, {"Authorization": "sesame"}, {"Authorization": "Bearer é"}):
                if route.method in ("GET", "POST"):
                    status, _ = served.call(route.method, path, {} if route.method == "POST" else None, headers=headers)
                    assert (status == 200) if path.startswith("/health") else (status == 401), path
        assert served.post("/generate", GENERATE, headers={"Authorization": "Bearer sesame"})[0] == 200


def test_weights_come_from_their_roots_only(served, weights, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "model.safetensors").touch()
    (outside / "config.json").write_text("{}")
    (weights / "link").symlink_to(outside)
    (weights / "file").mkdir()
    (weights / "file" / "config.json").write_text("{}")
    (weights / "file" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (weights / "loop").symlink_to(weights / "loop")
    bad = [
        outside,
        weights / ".." / "outside",
        weights / "link",
        weights / "file",
        weights / "loop",
        weights / "none",
        "/",
        ".",
    ]
    for path in [*map(str, bad), "", "\0", "a" * 5000, None, 7, ["x"], f"{weights}/7/../../outside"]:
        status, text = served.post("/update_weights_from_disk", {"model_path": path, "weight_version": "9"})
        assert status == 400 and "model_path" in text, path
    assert served.sampler.version == 0
    assert served.post("/update_weights_from_disk", {"model_path": str(weights / "7"), "weight_version": "9"})[0] == 200
    assert served.sampler.version == 9


def test_pickles_and_code_of_the_models_own_are_never_loaded(weights):
    (weights / "pickle").mkdir()
    (weights / "pickle" / "config.json").write_text("{}")
    (weights / "pickle" / "pytorch_model.bin").touch()
    with pytest.raises(BadRequest, match="pickle"):
        weight_directory(str(weights / "pickle"), [weights])
    (weights / "7" / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    with pytest.raises(BadRequest, match="auto_map"):
        weight_directory(str(weights / "7"), [weights])


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_what_would_unpickle_is_refused_by_name(served, path):
    status, text = served.post(path, {"serialized_named_tensors": ["gASV"]})
    assert status == 400 and "update_weights_from_disk" in text


def test_only_loopback_counts_as_private():
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and not is_loopback("0.0.0.0")


def test_a_server_has_one_owner_at_a_time_named_in_the_refusal(served, monkeypatch):
    monkeypatch.setattr(access, "OWNER_SILENCE", 3600.0)
    one, two = ({OWNER: f"{name} process 7 {name}-id"} for name in ("box-one", "box-two"))
    control = ["/pause_generation", "/continue_generation", "/update_weights_from_disk", "/release_memory_occupation"]
    assert served.post("/pause_generation", {}, headers=one)[0] == 200
    for path in (*control, "/resume_memory_occupation"):
        for headers in (two, {}):
            status, text = served.post(path, {}, headers=headers)
            assert status == 409 and "in use by the run of box-one process 7, last heard 0 s ago" in text, path
    for headers in (two, {}):
        assert served.post("/abort_request", {"abort_all": True}, headers=headers)[0] == 409
        assert served.post("/abort_request", {"rid": "its-own"}, headers=headers)[0] == 200
    assert served.post("/abort_request", {"abort_all": True}, headers=one)[0] == 200
    assert served.post("/continue_generation", {}, headers=one)[0] == 200
    assert served.post("/release_ownership", {}, headers=two)[0] == 200  # not its own to release
    assert served.post("/pause_generation", {}, headers=two)[0] == 409
    served.post("/release_ownership", {}, headers=one)
    assert served.post("/continue_generation", {}, headers=two)[0] == 200
    monkeypatch.setattr(access, "OWNER_SILENCE", 0.0)  # the run was killed half a minute ago
    assert served.post("/continue_generation", {}, headers=one)[0] == 200


def test_an_owner_whose_process_is_gone_from_this_host_is_forgotten_sooner(served, monkeypatch):
    monkeypatch.setattr(access, "OWNER_SILENCE", 3600.0)
    monkeypatch.setattr(access, "GONE_SILENCE", 0.0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone, alive, elsewhere = (
        {OWNER: f"{host} process {pid} id-{pid}"}
        for host, pid in ((socket.gethostname(), ended.pid), (socket.gethostname(), os.getpid()), ("box-two", ended.pid))
    )
    for owner, follower, status in ((gone, alive, 200), (alive, elsewhere, 409)):
        served.post("/continue_generation", {}, headers=owner)
        assert served.post("/continue_generation", {}, headers=follower)[0] == status
    served.post("/release_ownership", {}, headers=alive)
    served.post("/continue_generation", {}, headers=elsewhere)
    assert served.post("/continue_generation", {}, headers=alive)[0] == 409


def test_a_trainer_waits_for_a_run_that_may_have_been_killed_and_names_one_that_lives(served, monkeypatch):
    monkeypatch.setattr(client, "OWNER_PATIENCE", 0.2)
    monkeypatch.setattr(access, "OWNER_SILENCE", 0.1)
    other = {OWNER: "box-one process 7 id"}

    async def pause():
        sampler = attach(make_config({"rollout.addr": served.base}))
        try:
            await sampler.pause()
            await sampler.resume()
        finally:
            await sampler.close()

    served.post("/continue_generation", {}, headers=other)
    served.loop.run(asyncio.to_thread(lambda: asyncio.run(pause())))  # it was silent for long enough meanwhile
    monkeypatch.setattr(access, "OWNER_SILENCE", 3600.0)
    served.post("/continue_generation", {}, headers=other)
    with pytest.raises(UserError, match=r"^rollout\.addr: .*: in use by the run of box-one process 7"):
        served.loop.run(asyncio.to_thread(lambda: asyncio.run(pause())))
