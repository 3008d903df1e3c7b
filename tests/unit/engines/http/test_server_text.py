"""Our server with a tokenizer: text in and out as SGLang has it, and OpenAI's endpoint beside it."""

import asyncio
import contextlib
import json
import threading

import aiohttp
import numpy as np
import openai
import pytest

from rljax.agents import Dialogue, Endpoint, Guest, SamplingPolicy
from rljax.agents.exchange import LONG
from rljax.engines.http import protocol
from rljax.engines.http.server import SamplerServer, ServerOptions
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.types import SamplingParams
from tests.unit.agents.endpoint_under_test import Script, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("plain"))


@contextlib.asynccontextmanager
async def serving(tokenizer, says, *, token=None, **limits):
    """Yields (base URL, the script behind it)."""
    script = Script(tokenizer, says)
    params = SamplingParams(32, stop_token_ids=tokenizer.eos_token_ids)
    endpoint = Endpoint(
        Dialogue(tokenizer), "served", guest=Guest(script, SamplingPolicy(params, fixed=False), token), **limits
    )
    server = SamplerServer(script, ServerOptions("model", [], token=token), tokenizer, endpoint)
    host, port = await server.start("127.0.0.1", 0)
    try:
        yield f"http://{host}:{port}", script
    finally:
        await server.close()


def post(tokenizer, body, says="a | b || c<eos>", path="/generate", headers=None):
    """Posts one body; returns status and reply, and the requests that came to the sampler."""

    async def talk():
        async with (
            serving(tokenizer, lambda prompt: says) as (url, script),
            aiohttp.ClientSession() as session,
            session.post(url + path, json=body, headers=headers) as answer,
        ):
            return answer.status, json.loads(await answer.text()), script.requests

    return asyncio.run(talk())


# The native protocol ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "text", "matched"),
    [
        ({"stop": ["||"]}, "a | b ", "||"),
        ({"stop": "||", "no_stop_trim": True}, "a | b ||", "||"),
        ({"stop": ["zz"]}, "a | b || c", 2),
        ({"skip_special_tokens": False, "no_stop_trim": True}, "a | b || c<eos>", 2),
        ({"skip_special_tokens": False}, "a | b || c", 2),
        ({"stop_token_ids": [2]}, "a | b || c", 2),
        ({"stop_token_ids": [99]}, "a | b || c", 2),  # beside the model's own
    ],
)
def test_what_ended_a_completion_is_named_and_not_in_its_text(tokenizer, sampling, text, matched):
    status, reply, _ = post(tokenizer, {"text": "x", "sampling_params": sampling})
    assert status == 200 and reply["text"] == text
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logprob_start_len": 0}, "logprob_start_len: not supported"),
        ({"top_logprobs_num": 2}, "top_logprobs_num: not supported"),
        ({"return_hidden_states": True}, "return_hidden_states: not supported"),
        ({"sampling_parms": {}}, "did you mean sampling_params"),
        ({"sampling_params": {"temprature": 1}}, "did you mean temperature"),
        ({"text": "x" * (protocol.MAX_TEXT + 1)}, "characters (at most"),
    ],
)
def test_keys_are_read_or_refused(tokenizer, change, says):
    status, reply, requests = post(tokenizer, {"text": "x"} | change)
    assert status == 400 and says in reply["error"]["message"] and not requests


def test_keys_at_their_neutral_values_are_taken(tokenizer):
    neutral = {"logprob_start_len": -1, "top_logprobs_num": 0, "lora_path": None, "log_metrics": True, "image_data": None}
    assert post(tokenizer, {"text": "x"} | neutral)[0] == 200


def test_a_prompt_of_text_begins_with_the_bos_that_the_tokenizer_gives_one(tmp_path):
    build_char_tokenizer(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    special = {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}}
    single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    description["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(tmp_path)
    for path, body in (("/generate", {"text": "ab"}), ("/v1/completions", {"prompt": "ab"})):
        status, _, (request,) = post(tokenizer, body, says="c<eos>", path=path)
        assert status == 200 and request.prompt_ids.tolist() == [1, *tokenizer.encode("ab")]


def test_web_pages_of_other_sites_are_refused(tokenizer):
    body = {"text": "x"}
    for path in ("/generate", "/v1/completions"):
        status, reply, requests = post(tokenizer, body, path=path, headers={"Origin": "http://evil.example"})
        assert status == 403 and "evil.example" in reply["error"]["message"] and not requests


TEXT = "a" * (LONG + 1)


@pytest.mark.parametrize(
    ("path", "body", "step"),
    [
        ("/generate", {"text": TEXT}, "encode_document"),
        ("/v1/completions", {"model": "m", "prompt": TEXT}, "encode_document"),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": TEXT}]}, "apply_chat_template"),
    ],
)
def test_a_long_text_keeps_nobody_waiting(tokenizer, monkeypatch, path, body, step):
    """Others are answered while it is encoded, which goes on here once they are."""
    encode, begun, answered = getattr(type(tokenizer), step), threading.Event(), threading.Event()

    def held(*args, **options):
        begun.set()
        assert answered.wait(5), "nobody was answered meanwhile"
        return encode(*args, **options)

    monkeypatch.setattr(type(tokenizer), step, held)

    async def talk():
        async with serving(tokenizer, lambda prompt: "36<eos>") as (url, script), aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.post(url + path, json=body))
            assert await asyncio.to_thread(begun.wait, 5)
            async with session.get(url + "/health") as health:
                assert health.status == 200
            answered.set()
            async with await asked as answer:
                assert answer.status == 200, await answer.text()
            (request,) = script.requests
            assert len(request.prompt_ids) > LONG

    asyncio.run(talk())


# OpenAI's endpoint ------------------------------------------------------------------------------------------------------


def test_a_guest_samples_freely_and_nothing_is_recorded(tokenizer):
    async def talk():
        async with serving(tokenizer, lambda prompt: "36<eos>") as (url, script):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
                chat = client.chat.completions.create
                reply = await chat(
                    model="m", messages=[{"role": "user", "content": "a"}], temperature=0.5, max_tokens=64, seed=5
                )
                with pytest.raises(openai.AuthenticationError, match="needs a session"):
                    await client.post("/rewards", body={"reward": 1}, cast_to=object)
            return reply, script.requests

    reply, (request,) = asyncio.run(talk())
    assert reply.model == "served" and reply.choices[0].message.content == "36"
    assert request.params.temperature == 0.5 and request.params.max_new_tokens == 64 and request.seed == 5


def test_an_agent_elsewhere_opens_a_session_and_takes_its_trajectories(tokenizer):
    async def talk():
        async with serving(tokenizer, lambda prompt: "36<eos>", token="sesame") as (url, script):
            stranger = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="guess", max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                await stranger.post("/sessions", body={}, cast_to=object)
            owner = stranger.with_options(api_key="sesame")
            session = await owner.post("/sessions", body={"seed": 3}, cast_to=dict)
            agent = openai.AsyncOpenAI(base_url=session["base_url"], api_key="unused", max_retries=0)
            messages = [{"role": "user", "content": "a"}]
            for text in "bc":
                reply = await agent.chat.completions.create(model="m", messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": text}]
            await agent.post("/rewards", body={"reward": 1.0}, cast_to=object)
            found = await agent.get("/trajectories?style=individual&turn_discount=0.5", cast_to=dict)
            assert [t["reward"] for t in found["trajectories"]] == [0.5, 1.0]
            (whole,) = (await agent.get("/trajectories", cast_to=dict))["trajectories"]
            with pytest.raises(openai.BadRequestError, match="style"):
                await agent.get("/trajectories?style=both", cast_to=dict)
            await owner.delete(f"/sessions/{session['id']}", cast_to=object)
            with pytest.raises(openai.AuthenticationError):
                await agent.models.list()
            await asyncio.gather(*(client.close() for client in (stranger, owner, agent)))
            return whole, script.completions

    whole, completions = asyncio.run(talk())
    mask = np.array(whole["loss_mask"])
    for name, attribute in (("token_ids", "token_ids"), ("behavior_logp", "logp"), ("versions", "versions")):
        joined = np.concatenate([getattr(done, attribute) for done in completions])
        np.testing.assert_array_equal(np.array(whole[name])[mask].astype(joined.dtype), joined)


def test_too_many_requests_are_told_to_wait(tokenizer):
    async def talk():
        async with serving(tokenizer, lambda prompt: "36<eos>", most_requests=0) as (url, _):
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="m", prompt="x")
            await client.close()

    asyncio.run(talk())
