"""The endpoint, driven by the official client."""

import asyncio
import dataclasses

import numpy as np
import openai
import pytest

from rljax.errors import SamplerError, UserError
from rljax.types import SamplingParams
from tests.unit.agents.endpoint_under_test import CALCULATOR, CALL, THINKING, Served, make_tokenizer

USER = [{"role": "user", "content": "12*3?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("thinking"), THINKING)


def speak(prompt):
    return "It is 36.<eos>" if "tool:36" in prompt else f"Let me compute. {CALL}<eos>"


async def joined(stream):
    """Joins the chunks of a stream to (reasoning, content, calls, finish, chunks)."""
    reasoning, content, calls, finish, chunks = "", "", [], None, []
    async for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    return reasoning, content, calls, finish, chunks


def test_tokens_in_tokens_out_over_two_turns_with_a_tool(tokenizer):
    served = Served(tokenizer, speak)

    async def talk(client):
        messages = list(USER)
        first = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
        reply = first.choices[0]
        assert reply.finish_reason == "tool_calls" and reply.message.content == "Let me compute."
        (call,) = reply.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("calculator", '{"expression": "12*3"}')
        messages += [reply.message, {"role": "tool", "tool_call_id": call.id, "content": "36"}]
        second = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
        assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It is 36.", "stop")
        assert second.usage.prompt_tokens == len(served.script.requests[1].prompt_ids)

    served.run(talk)
    first, second = served.script.requests
    done = served.script.completions[0].token_ids
    whole = np.concatenate([first.prompt_ids, done])
    np.testing.assert_array_equal(second.prompt_ids[: len(whole)], whole)
    assert tokenizer.decode(second.prompt_ids[len(whole) :], skip_special_tokens=False) == "\ntool:36<eos>\nassistant:"
    assert served.session.recording.breaks == 0


@pytest.mark.parametrize("piece", [1, 7, None])
@pytest.mark.parametrize("text", ["It is 36.", "", "why\n\nso\n</think>\n\n36 <th", "why </thin\n</think>\n4", "not closed"])
def test_a_stream_joins_to_the_whole_reply(tokenizer, thinking, text, piece):
    reasons = "</think>" in text or text == "not closed"
    own = thinking if reasons else tokenizer
    ask = {"model": "m", "messages": USER}
    whole = Served(own, lambda prompt: f"{text}<eos>").run(lambda client: client.chat.completions.create(**ask))

    async def stream(client):
        return await joined(await client.chat.completions.create(**ask, stream=True))

    reasoning, content, calls, finish, _ = Served(own, lambda prompt: f"{text}<eos>", piece=piece).run(stream)
    message = whole.choices[0].message
    assert (reasoning, content) == (getattr(message, "reasoning_content", ""), message.content)
    assert not calls and finish == whole.choices[0].finish_reason == "stop"


def test_a_stream_has_calls_and_usage(tokenizer):
    async def stream(client):
        options = {"include_usage": True}
        return await joined(
            await client.chat.completions.create(
                model="m", messages=USER, tools=[CALCULATOR], stream=True, stream_options=options
            )
        )

    served = Served(tokenizer, speak, piece=3)
    _, content, calls, finish, chunks = served.run(stream)
    assert content == "Let me compute." and finish == "tool_calls"
    assert [(call.index, call.function.name) for call in calls] == [(0, "calculator")]
    assert chunks[-1].usage.completion_tokens == len(served.script.completions[0].token_ids)


@pytest.mark.parametrize("piece", [1, None])
def test_a_stop_string_ends_the_text_and_stays_in_the_tokens(tokenizer, piece):
    async def both(client):
        whole = await client.chat.completions.create(model="m", messages=USER, stop=["||"])
        stream = await client.chat.completions.create(model="m", messages=USER, stop="||", stream=True)
        return whole.choices[0], await joined(stream)

    served = Served(tokenizer, lambda prompt: "a | b || c<eos>", piece=piece)
    whole, (_, content, _, finish, _) = served.run(both)
    assert whole.message.content == content == "a | b " and whole.finish_reason == finish == "stop"
    assert tokenizer.decode(served.session.recording.turns[0].completion.token_ids) == "a | b ||"


def test_n_choices_are_branches_with_seeds_of_their_own(tokenizer):
    served = Served(tokenizer, lambda prompt: "36<eos>")
    reply = served.run(lambda client: client.chat.completions.create(model="m", messages=USER, n=3))
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({request.seed for request in served.script.requests}) == 3
    assert [turn.choice for turn in served.session.recording.turns] == [0, 1, 2]
    assert reply.usage.prompt_tokens == len(served.script.requests[0].prompt_ids)


def test_seeds_depend_on_session_and_prompt_and_not_on_the_order(tokenizer):
    def seeds(order, session_seed=7, **options):
        served = Served(tokenizer, lambda prompt: "36<eos>", seed=session_seed)

        async def talk(client):
            for text in order:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **options)

        served.run(talk)
        return {tokenizer.decode(r.prompt_ids) + str(i): r.seed for i, r in sorted(enumerate(served.script.requests))}

    forth, back = list(seeds("ab").values()), list(seeds("ba").values())
    assert forth == back[::-1] and forth[0] != forth[1]
    again = list(seeds("aa").values())
    assert again[0] == forth[0] and again[0] != again[1]
    same = list(seeds("aa", seed=5).values())
    assert same[0] == same[1] != next(iter(seeds("a", 8, seed=5).values()))


def test_logprobs_are_those_of_the_recording(tokenizer):
    served = Served(tokenizer, lambda prompt: "36.<eos>")

    async def talk(client):
        chat = await client.chat.completions.create(
            model="m", messages=USER, logprobs=True, extra_body={"return_token_ids": True}
        )
        text = await client.completions.create(model="m", prompt="1+", logprobs=0, max_tokens=8)
        return chat, text

    chat, text = served.run(talk)
    first, second = served.session.recording.turns
    np.testing.assert_array_equal(
        np.array([token.logprob for token in chat.choices[0].logprobs.content], np.float32), first.completion.logp
    )
    assert chat.choices[0].token_ids == first.completion.token_ids.tolist()
    assert chat.prompt_token_ids == first.prompt_ids.tolist()
    np.testing.assert_array_equal(np.array(text.choices[0].logprobs.token_logprobs, np.float32), second.completion.logp)
    assert "".join(text.choices[0].logprobs.tokens) == "36.<eos>"


def test_completions_of_text_and_of_ids_go_on_from_the_sampled_tokens(tokenizer):
    served = Served(tokenizer, lambda prompt: "36<eos>")

    async def talk(client):
        first = await client.completions.create(model="m", prompt="12*3=")
        await client.completions.create(model="m", prompt=f"12*3={first.choices[0].text}, and 2*3=")
        await client.completions.create(model="m", prompt=served.session.recording.turns[0].token_ids.tolist() + [9])
        several = await client.completions.create(model="m", prompt=["a", "b"], n=2)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]

    served.run(talk)
    first, text, ids, *several = served.session.recording.turns
    assert text.parent is first and ids.parent is first and not any(turn.parent for turn in several)
    np.testing.assert_array_equal(text.prompt_ids[: len(first.token_ids)], first.token_ids)


REFUSED = [
    ({"temprature": 1}, "temprature", "did you mean"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    ({"top_logprobs": 5, "logprobs": True}, "top_logprobs", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"tool_choice": "required", "tools": [CALCULATOR]}, "tool_choice", "only 'auto' and 'none'"),
    ({"temperature": 0.5}, "temperature", "samples with temperature 1"),
    ({"temperature": 0}, "temperature", "samples with temperature 1"),
    ({"temperature": "hot"}, "temperature", "must be a number"),
    ({"top_p": 0.9}, "top_p", "samples with top_p 1"),
    ({"max_tokens": 10**6}, "max_tokens", "at most 256"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "out of range"),
    ({"n": 1000}, "n", "out of range"),
    ({"stop": [""]}, "stop", "strings of 1"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0]", "did you mean user"),
    ({"messages": [{"role": "user", "content": "x", "contnet": 1}]}, "messages[0]", "no such key"),
    ({"messages": None}, "messages", "Missing required"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
    ({"model": 3}, "model", "must be str"),
]


@pytest.mark.parametrize(("change", "param", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_refused_by_name(tokenizer, change, param, says):
    body = {"model": "m", "messages": USER} | change

    async def talk(client):
        with pytest.raises(openai.BadRequestError) as error:
            await client.post("/chat/completions", body=body, cast_to=object)
        return error.value

    error = Served(tokenizer, speak).run(talk)
    assert error.param == param and says in str(error), str(error)


def test_values_that_change_nothing_are_taken(tokenizer):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "n": 1, "user": "me", "store": False, "temperature": 1.0}
    neutral |= {"top_p": 1, "parallel_tool_calls": True, "response_format": {"type": "text"}, "logit_bias": {}}
    served = Served(tokenizer, lambda prompt: "36<eos>")
    served.run(lambda client: client.chat.completions.create(model="m", messages=USER, **neutral))
    assert served.script.requests[0].params == dataclasses.replace(served.session.policy.params)


def test_sampling_of_a_training_session_is_the_run_s_where_it_overrides(tokenizer):
    own = SamplingParams(8, temperature=0.7, stop_token_ids=tokenizer.eos_token_ids)
    served = Served(tokenizer, lambda prompt: "36<eos>", params=own, override=True)
    served.run(lambda client: client.chat.completions.create(model="m", messages=USER, temperature=0, top_p=0.5, max_tokens=99))
    assert served.script.requests[0].params == own


def test_models_and_keys(tokenizer):
    served = Served(tokenizer, speak)

    async def talk(client):
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match="gpt-4o"):
            await client.models.retrieve("gpt-4o")
        assert served.server._server.strangers == 0  # its connection has shown the key
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="guess", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
            assert served.server._server.strangers == 1
        other = client.with_options(api_key="guess")
        by_path = other.with_options(base_url=str(client.base_url).replace("/v1", f"/sessions/{served.session.key}/v1"))
        await by_path.chat.completions.create(model="m", messages=USER)
        return client.base_url

    served.run(talk)
    assert len(served.session.recording.turns) == 1


def test_rewards_are_set_by_turn(tokenizer):
    served = Served(tokenizer, lambda prompt: "36<eos>")

    async def talk(client):
        first = await client.chat.completions.create(model="m", messages=USER)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "b"}])
        await client.post("/rewards", body={"reward": 0.25, "completion_id": first.id}, cast_to=object)
        await client.post("/rewards", body={"reward": 1}, cast_to=object)
        for body in ({"reward": "much"}, {"reward": True}, {"reward": 1, "completion_id": "chatcmpl-0"}, {"reward": 1e300}, {}):
            with pytest.raises(openai.BadRequestError):
                await client.post("/rewards", body=body, cast_to=object)
        for text, says in (("Infinity", "not a JSON number"), ("1" + 400 * "0", "not a finite"), ("1e39", "no more than")):
            with pytest.raises(openai.BadRequestError, match=says):
                await client.post("/rewards", content=f'{{"reward": {text}}}', cast_to=object)

    served.run(talk)
    assert [turn.reward for turn in served.session.recording.turns] == [0.25, 1.0]


@pytest.mark.parametrize(("raised", "status"), [(SamplerError("gone"), 503), (UserError("the prompt is too long"), 400)])
@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_the_sampler_have_a_status_and_are_remembered(tokenizer, raised, status, stream):
    served = Served(tokenizer, lambda prompt: raised)

    async def talk(client):
        with pytest.raises(openai.APIStatusError) as error:
            await client.chat.completions.create(model="m", messages=USER, stream=stream)
        return error.value

    error = served.run(talk)
    assert error.status_code == status and str(raised) in str(error)
    assert (served.session.lost is raised) == isinstance(raised, SamplerError)
    assert not served.session.recording.turns


def test_the_end_of_a_session_ends_its_requests(tokenizer):
    served, begun = Served(tokenizer, speak), asyncio.Event()

    async def forever(request):
        begun.set()
        await asyncio.Event().wait()
        yield

    async def talk(client):
        request = asyncio.create_task(client.chat.completions.create(model="m", messages=USER))
        await begun.wait()
        served.session.close()
        with pytest.raises(openai.APIStatusError, match="ended"):
            await request

    served.script.stream = forever
    served.run(talk)
    assert served.session.running == 0
