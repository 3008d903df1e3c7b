"""Recording and export: branches, breaks, discounts, and that each token is trained on once."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rljax.agents.export import discounted
from rljax.types import PROMPT_VERSION, Finish
from tests.unit.agents.endpoint_under_test import THINKING, Served, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("thinking"), THINKING)


def user(text):
    return {"role": "user", "content": text}


def echo(prompt):
    """Answers the last message with its text in capitals, and a count of the turns before."""
    *_, last, _ = prompt.split("<eos>\n")
    return f"{last.partition(':')[2].upper()}{prompt.count('assistant:')}<eos>"


async def say(client, messages, text):
    """Continues a conversation by a user's message and the reply to it; returns both with it."""
    asked = [*messages, user(text)]
    reply = await client.chat.completions.create(model="m", messages=asked)
    return [*asked, reply.choices[0].message.model_dump()]


def sampled(recording):
    """All sampled tokens of a recording: (request's position, token, log-prob, version)."""
    return sorted(
        (turn.number, turn.choice, at, int(token), float(logp), int(version))
        for turn in recording.turns
        for at, (token, logp, version) in enumerate(
            zip(turn.completion.token_ids, turn.completion.logp, turn.completion.versions, strict=True)
        )
    )


def trained(trajectories):
    rows = [np.stack([t.token_ids, t.behavior_logp, t.versions])[:, t.loss_mask] for t in trajectories]
    return sorted(map(tuple, np.concatenate(rows, axis=1).T.tolist()))


def branching(tokenizer):
    """A conversation of three turns, a sub-agent that goes on from its first, and one of its own."""
    served = Served(tokenizer, echo)

    async def talk(client):
        first = await say(client, [], "a")
        second = await say(client, first, "b")
        other = await say(client, first, "x")  # a branch
        await asyncio.gather(say(client, second, "c"), say(client, [], "alone"), say(client, other, "y"))

    served.run(talk)
    return served.session


@pytest.mark.parametrize("style", ["concat", "individual"])
def test_each_sampled_token_is_trained_on_once(tokenizer, style):
    session = branching(tokenizer)
    found = session.trajectories(style, 1.0, {})
    tokens = [(float(token), logp, float(version)) for *_, token, logp, version in sampled(session.recording)]
    assert trained(found) == sorted(tokens)
    assert len(found) == (6 if style == "individual" else 3) and session.recording.breaks == 0
    for trajectory in found:
        assert not trajectory.loss_mask[trajectory.versions == PROMPT_VERSION].any()
        assert not trajectory.behavior_logp[~trajectory.loss_mask].any()


def test_a_branch_s_context_is_what_was_sampled_from(tokenizer):
    session = branching(tokenizer)
    texts = [tokenizer.decode(t.token_ids, skip_special_tokens=False) for t in session.trajectories("concat", 1.0, {})]
    main = "user:a<eos>\nassistant:A1<eos>\n"
    assert sorted(texts) == sorted(
        [
            f"{main}user:b<eos>\nassistant:B2<eos>\nuser:c<eos>\nassistant:C3<eos>",
            f"{main}user:x<eos>\nassistant:X2<eos>\nuser:y<eos>\nassistant:Y3<eos>",
            "user:alone<eos>\nassistant:ALONE1<eos>",
        ]
    )


def test_every_part_has_the_components_of_the_episode(tokenizer):
    found = branching(tokenizer).trajectories("concat", 1.0, {"right": 0.5})
    assert [dict(t.components) for t in found] == [{"right": 0.5, "turns": 6.0, "prefix_breaks": 0.0, "context_full": 0.0}] * 3


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 1.0])
def test_the_reward_of_a_turn_is_its_own_and_the_discounted_rest(tokenizer, discount):
    own = [0.2, None, 1.0, -0.5]
    expected = [sum(discount ** (k - i) * (own[k] or 0.0) for k in range(i, 4)) for i in range(4)]
    np.testing.assert_allclose(discounted(own, discount), expected)
    served = Served(tokenizer, echo)

    async def talk(client):
        messages = []
        for text, reward in zip("abcd", own, strict=True):
            messages = await say(client, messages, text)
            if reward is not None:
                served.session.set_reward(reward)

    served.run(talk)
    individual = served.session.trajectories("individual", discount, {})
    np.testing.assert_allclose([t.reward for t in individual], expected)
    (whole,) = served.session.trajectories("concat", discount, {})
    assert whole.reward == pytest.approx(expected[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: [messages[0], messages[1] | {"content": "edited"}, *messages[2:]],
        lambda messages: messages[2:],  # a window over the last messages
        lambda messages: [{"role": "system", "content": "late"}, *messages],
    ],
)
def test_a_changed_history_starts_a_new_part_and_is_counted(tokenizer, change):
    served = Served(tokenizer, echo)

    async def talk(client):
        messages = await say(client, await say(client, [], "a"), "b")
        await say(client, change(messages), "c")

    served.run(talk)
    assert served.session.recording.breaks == 1 and served.session.recording.turns[-1].parent is None
    first, second = served.session.trajectories("concat", 1.0, {})
    assert second.components["prefix_breaks"] == 1
    assert trained([first, second]) == sorted((float(t), lp, float(v)) for *_, t, lp, v in sampled(served.session.recording))


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: {"role": "assistant", "content": f" {reply['content']}\n"},  # blanks around it
        lambda reply: reply | {"reasoning_content": "none of it"},
        lambda reply: {"role": "assistant", "content": [{"type": "text", "text": reply["content"]}]},
    ],
)
def test_clients_may_write_a_reply_otherwise(tokenizer, change):
    served = Served(tokenizer, echo)

    async def talk(client):
        *messages, reply = await say(client, [], "a")
        await say(client, [*messages, change(reply)], "b")

    served.run(talk)
    assert (
        served.session.recording.breaks == 0 and served.session.recording.turns[1].parent is served.session.recording.turns[0]
    )


def test_other_tools_are_another_conversation(tokenizer):
    served = Served(tokenizer, echo)

    async def talk(client):
        messages = await say(client, [], "a")
        tool = {"type": "function", "function": {"name": "now", "parameters": {}}}
        await client.chat.completions.create(model="m", messages=[*messages, user("b")], tools=[tool])

    served.run(talk)
    assert served.session.recording.turns[1].parent is None


@pytest.mark.parametrize("opened", [True, False], ids=["the prompt opens it", "the model opens it"])
def test_reasoning_that_the_template_drops_breaks_the_prefix_and_that_it_keeps_does_not(thinking, tmp_path, opened):
    if not opened:
        thinking = make_tokenizer(tmp_path, THINKING.replace("assistant:<think>\n", "assistant:"))
    begin = "" if opened else "<think>\n"
    served = Served(thinking, lambda prompt: f"{begin}why {prompt.count('user:')}\n</think>\n\nso<eos>")

    async def talk(client):
        messages = await say(client, [], "a")
        kept = await client.chat.completions.create(model="m", messages=[*messages, {"role": "tool", "content": "t"}])
        assert kept.choices[0].message.reasoning_content == "why 1"
        await say(client, messages, "b")  # a user's message: the reasoning before it is not rendered any more

    served.run(talk)
    first, tool, other = served.session.recording.turns
    assert tool.parent is first and other.parent is None and served.session.recording.breaks == 1
    text = thinking.decode(tool.prompt_ids, skip_special_tokens=False)
    end = "<think>\n" if opened else ""
    assert text == f"user:a<eos>\nassistant:<think>\nwhy 1\n</think>\n\nso<eos>\ntool:t<eos>\nassistant:{end}"
    assert "<think>\nwhy" not in thinking.decode(other.prompt_ids, skip_special_tokens=False)


def test_a_completion_that_was_cut_is_gone_on_from(tokenizer):
    served = Served(tokenizer, lambda prompt: "a long story<eos>")
    served.session.policy = dataclasses.replace(
        served.session.policy, params=dataclasses.replace(served.session.policy.params, max_new_tokens=4)
    )

    async def talk(client):
        await say(client, await say(client, [], "a"), "b")

    served.run(talk)
    first, second = served.session.recording.turns
    assert first.finish is Finish.LENGTH and second.parent is first
    assert (
        tokenizer.decode(second.prompt_ids, skip_special_tokens=False)
        == "user:a<eos>\nassistant:a lo<eos>\nuser:b<eos>\nassistant:"
    )


def test_the_template_s_arguments_of_a_session_are_those_of_its_prompt(tmp_path):
    tokenizer = make_tokenizer(tmp_path, "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    served = Served(tokenizer, lambda prompt: "x<eos>")
    served.session.template_kwargs = {"mood": "calm:"}

    async def talk(client):
        await client.chat.completions.create(model="m", messages=[user("a")])
        own = {"chat_template_kwargs": {"mood": "merry:"}}
        await client.chat.completions.create(model="m", messages=[user("a")], extra_body=own)

    served.run(talk)
    assert [tokenizer.decode(turn.prompt_ids) for turn in served.session.recording.turns] == ["calm:a", "merry:a"]
