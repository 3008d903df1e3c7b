"""Episodes of several turns whose next prompt does not fit the context: they end there, and count."""

import asyncio
import dataclasses
import sys
import types

import numpy as np
import pytest

from rljax.config.schema import RolloutConfig
from rljax.environments import Source
from rljax.errors import PromptTooLong, Rejected
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.rewards import Score
from rljax.sanity.lengths import check_turns
from rljax.types import CONTEXT_FULL, Finish, Prompt, SamplingParams
from rljax.workflows import build_workflow, tokens_between
from tests.unit.agents.endpoint_under_test import Script, make_tokenizer
from tests.unit.workflows.scripted import ScriptedSampler

TEMPLATE = (  # turns as "role:text|", with the tools before the first
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = ({"role": "user", "content": "7?"},)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'


class Narrow:
    """A sampler with a context: it refuses the requests that an engine's own would refuse."""

    version = 0

    def __init__(self, sampler, context):
        self.sampler, self.context = sampler, context

    async def generate(self, request):
        if len(request.prompt_ids) >= self.context:
            raise PromptTooLong(f"request {request.id}: a prompt of {len(request.prompt_ids)} tokens leaves no room")
        return await self.sampler.generate(request)

    async def stream(self, request):
        if len(request.prompt_ids) >= self.context:
            raise PromptTooLong(f"request {request.id}: a prompt of {len(request.prompt_ids)} tokens leaves no room")
        async for piece in self.sampler.stream(request):
            yield piece


class Half:
    async def score(self, prompt, completion):
        return Score(0.5, {"half": 0.5})


class Endless:
    """An environment that never ends; the reward of a step is the number that the action says."""

    def reset(self, seed):
        return "7?"

    def step(self, action):
        return "and?", float(action.strip("|")), False, False, {"said": float(action.strip("|"))}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("char")
    build_char_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(directory)


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    module = types.ModuleType("own_endless")
    module.Endless = Endless
    monkeypatch.setitem(sys.modules, "own_endless", module)


def played(tokenizer, name, *, context, **arguments):
    """Returns the parts of an episode whose policy says 1, 2, 3, ... and its requests."""
    texts = [f"{CALL}{turn}" if name == "tool_use" else str(turn) for turn in range(1, 6)]
    (end,) = tokenizer.encode("|")
    sampler = ScriptedSampler(tokenizer, *texts, end=end)
    workflow = build_workflow(name, tokenizer=tokenizer, rewards=Half(), arguments=arguments)
    prompt = Prompt("0/3", ASKED, {"environment": Source("own_endless:Endless", 7, {}).to_json()})
    params = SamplingParams(200, stop_token_ids=(end,))
    done = asyncio.run(workflow.episode(Narrow(sampler, context), prompt, params, 3))
    return done if isinstance(done, list) else [done], sampler.requests


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("multi_turn", {"turn_discount": 0.5}),
        ("environment", {"discount": 0.5}),
        ("environment", {"discount": 0.5, "credit": "turn"}),
        ("tool_use", {}),
    ],
)
@pytest.mark.parametrize("turns", [1, 3])
def test_an_episode_without_room_is_the_one_that_had_no_further_turn(tokenizer, name, arguments, turns):
    """But for its finish, and the count: as if `max_turns` had ended it."""
    limited, requests = played(tokenizer, name, context=10**6, max_turns=turns, **arguments)
    assert len(requests) == turns and not limited[-1].components[CONTEXT_FULL]
    for context in (len(requests[-1].prompt_ids) + 1, len(limited[-1].token_ids) + 1):
        full, asked = played(tokenizer, name, context=context, max_turns=5, **arguments)
        assert len(asked) == turns and len(full) == len(limited)
        assert full[-1].finish is Finish.LENGTH and full[0].components[CONTEXT_FULL] == 1
        for one, other in zip(full, limited, strict=True):
            for field in dataclasses.fields(one):
                if field.name not in ("finish", "components"):
                    np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
            known = one.components | {"tool_calls": 0}  # a call whose result found no room was made
            assert known == other.components | {CONTEXT_FULL: 1.0, "tool_calls": 0}
        assert [part.finish for part in full[:-1]] == [part.finish for part in limited[:-1]]


@pytest.mark.parametrize("name", ["multi_turn", "environment", "tool_use"])
def test_a_first_prompt_that_does_not_fit_is_an_error(tokenizer, name):
    with pytest.raises(PromptTooLong):
        played(tokenizer, name, context=2)


# Agents


async def by_turn(client, session, messages):
    for reward in (0.25, 1.0, 4.0):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        session.set_reward(reward, reply.id)
        messages = [*messages, reply.choices[0].message, {"role": "user", "content": "again"}]


async def silent(client, messages):
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages = [*messages, reply.choices[0].message, {"role": "user", "content": "again"}]


async def careful(client, messages):
    from openai import BadRequestError

    try:
        await silent(client, messages)
    except BadRequestError as error:
        assert error.code == "context_length_exceeded" and "exceeds the model's context length" in str(error)
        return 0.75


async def selective(client, messages):
    try:
        await silent(client, messages)
    except Exception:
        raise Rejected from None


def talked(tmp_path, agent, context, says="36.<eos>", **arguments):
    tokenizer = make_tokenizer(tmp_path)
    given = {"agent": agent if ":" in agent else f"{__name__}:{agent}", **arguments}
    workflow = build_workflow("agent", tokenizer=tokenizer, rewards=Half(), arguments=given)
    prompt = Prompt("0/0", ASKED, {"environment": Source("own_endless:Endless", 7, {}).to_json()})
    script = Script(tokenizer, lambda text: says)
    params = SamplingParams(50, stop_token_ids=tokenizer.eos_token_ids)
    done = asyncio.run(workflow.episode(Narrow(script, context), prompt, params, 7))
    return done, script, len(tokenizer.encode("user:7?<eos>\nassistant:36.<eos>\nuser:again<eos>\nassistant:"))


@pytest.mark.parametrize(("agent", "rewards"), [("by_turn", [0.25 + 1.0]), ("silent", [0.5]), ("careful", [0.75])])
def test_an_agent_that_fails_for_want_of_room_has_the_reward_of_its_turns(tmp_path, agent, rewards):
    pytest.importorskip("openai")
    _, _, second = talked(tmp_path, agent, 10**6)
    done, script, _ = talked(tmp_path, agent, second + 1)
    assert len(script.requests) == 2 and [part.reward for part in done] == rewards
    assert done[-1].finish is Finish.LENGTH and done[-1].components[CONTEXT_FULL] == 1
    sampled = np.concatenate([completion.token_ids for completion in script.completions])
    np.testing.assert_array_equal(np.concatenate([part.token_ids[part.loss_mask] for part in done]), sampled)


def test_an_agent_may_reject_such_an_episode_and_answers_for_its_first_prompt(tmp_path):
    pytest.importorskip("openai")
    with pytest.raises(Rejected):
        talked(tmp_path, "selective", 60)
    with pytest.raises(Exception, match="leaves no room"):
        talked(tmp_path, "silent", 5)


def test_the_agent_that_plays_an_environment_ends_it_with_its_rewards(tmp_path):
    pytest.importorskip("openai")
    done, script, _ = talked(tmp_path, "rljax.environments.agent:play", 80, says="36<eos>")
    turns = len(script.requests)
    assert turns > 1 and done[-1].reward == 36.0 * turns and done[-1].components["said"] == 36.0
    assert done[-1].components[CONTEXT_FULL] == 1 and done[-1].finish is Finish.LENGTH


# Before a run


def test_check_counts_the_prompts_whose_second_turn_the_sampler_would_refuse(tokenizer):
    prompts = [Prompt("0/3", ({"role": "user", "content": "7" * n},), {"answer": "x"}) for n in range(1, 6)]
    lengths = tokenizer.prompt_lengths(prompts)
    rollout = RolloutConfig(workflow="multi_turn", workflow_args={"feedback": "no", "max_turns": 2})
    between = tokens_between(rollout, tokenizer, prompts[0])
    least = ScriptedSampler(tokenizer, "", "", end=tokenizer.eos_token_id)
    for context in (int(lengths[2]) + between + 1, int(lengths[0]) + between + 1, 100):
        workflow = build_workflow("multi_turn", tokenizer=tokenizer, rewards=Half(), arguments=rollout.workflow_args)
        params, refused = SamplingParams(20, stop_token_ids=(tokenizer.eos_token_id,)), 0
        for prompt in prompts:
            least.requests.clear()
            done = asyncio.run(workflow.episode(Narrow(least, context), prompt, params, 3))
            refused += done.components[CONTEXT_FULL]
        lines = [found.line for found in check_turns("set", lengths, between=between, context=context, why="")]
        assert [line.split(" leave")[0] for line in lines] == [f"{refused:.0f} of 5"] * bool(refused)
    once = dataclasses.replace(rollout, workflow_args={"max_turns": 1})
    assert tokens_between(once, tokenizer, prompts[0]) is None
