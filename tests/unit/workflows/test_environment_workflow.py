"""Episodes of an environment: what is trained on, what the next request holds, what a turn earns."""

import asyncio
import sys
import types

import numpy as np
import pytest

from rljax.environments import Source
from rljax.errors import EnvironmentFailed, EnvironmentTimeout, UserError
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.types import PROMPT_VERSION, Finish, Prompt, SamplingParams
from rljax.workflows import build_workflow, check_prompts
from tests.unit.workflows.scripted import ScriptedSampler

BRIEF = {"question": "1-{size}?", "higher": ">", "lower": "<", "illegal": "!"}


class Countdown:
    """Asks `length` times; the reward of a step is the number that the action says."""

    def __init__(self, length=3, fault=""):
        self.left, self.fault = length, fault

    def reset(self, seed, start=0):
        return f"{seed + start}?"

    def step(self, action):
        if self.fault == "raises":
            raise KeyError("lost")
        if self.fault == "hangs":
            asyncio.run(asyncio.Event().wait())
        if isinstance(self.fault, tuple | list):
            return "", self.fault[0], False, False, {}
        if self.fault == "flag":
            return "", 0.0, "no", False, {}
        if self.fault == "four":
            return "", 0.0, False, {}
        self.left -= 1
        info = {"left": self.left, "name": "x", "nan": float("nan"), "large": 1e300, "digits": 10**400}
        return f"{self.left}!", float(action), self.left == 0, False, info


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("char")
    build_char_tokenizer(directory)
    return load_tokenizer(directory)


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    module = types.ModuleType("own_environments")
    module.Countdown = Countdown
    monkeypatch.setitem(sys.modules, "own_environments", module)


def prompt_of(source, first="7?"):
    return Prompt("0/3", ({"role": "user", "content": first},), {"environment": source})


def play(tokenizer, sampler, source, first="7?", **arguments):
    prompt = prompt_of(source, first)
    workflow = build_workflow("environment", tokenizer=tokenizer, rewards=None, arguments=arguments)
    return asyncio.run(workflow.episode(sampler, prompt, SamplingParams(8), 3))


def countdown(**arguments):
    return Source("own_environments:Countdown", 7, arguments).to_json()


def test_no_token_of_the_environment_is_trained_on(tokenizer):
    sampler = ScriptedSampler(tokenizer, "1", "20", "3")
    trajectory = play(tokenizer, sampler, countdown())
    ids, logp, versions = sampler.sampled()
    mask = trajectory.loss_mask
    assert trajectory.token_ids[mask].tolist() == ids and trajectory.versions[mask].tolist() == versions
    assert trajectory.behavior_logp[mask].tolist() == logp
    assert tokenizer.decode(trajectory.token_ids[~mask]) == "7?2!1!"  # the last observation is nobody's prompt
    assert set(trajectory.versions[~mask]) == {PROMPT_VERSION} and not trajectory.behavior_logp[~mask].any()
    for before, after in zip(sampler.requests, sampler.requests[1:], strict=False):
        assert after.prompt_ids[: len(before.prompt_ids)].tolist() == before.prompt_ids.tolist()  # tokens in, tokens out
    assert trajectory.reward == 24 and trajectory.components == {"turns": 3.0, "context_full": 0.0, "left": 0.0}


def test_the_discounted_return_is_the_episodes_or_each_turns(tokenizer):
    rewards, discount = [1.0, 20.0, 3.0], 0.5
    whole = play(tokenizer, ScriptedSampler(tokenizer, "1", "20", "3"), countdown(), discount=discount)
    parts = play(tokenizer, ScriptedSampler(tokenizer, "1", "20", "3"), countdown(), discount=discount, credit="turn")
    returns = [sum(discount**k * r for k, r in enumerate(rewards[t:])) for t in range(3)]
    assert whole.reward == returns[0] and [part.reward for part in parts] == returns
    # together the parts train on each sampled token once, each at the position that it has in the whole
    trained = np.zeros(len(whole), int)
    for part in parts:
        assert part.token_ids.tolist() == whole.token_ids[: len(part)].tolist()
        trained[: len(part)] += part.loss_mask
        assert part.behavior_logp[part.loss_mask].tolist() == whole.behavior_logp[: len(part)][part.loss_mask].tolist()
    assert trained.tolist() == whole.loss_mask.astype(int).tolist()


def test_an_episode_ends_at_the_limits_and_when_an_action_is_cut(tokenizer):
    def turns(*texts, finish=Finish.STOP, **arguments):
        sampler = ScriptedSampler(tokenizer, *texts, finish=finish)
        trajectory = play(tokenizer, sampler, countdown(length=9), **arguments)
        assert trajectory.components["turns"] == len(sampler.requests)
        return len(sampler.requests), trajectory

    assert turns(*"1234", max_turns=3)[0] == 3
    # 2 tokens of prompt, 2 of an action, 2 of an observation: the second action ends at 8 tokens
    assert turns(*"1234", max_tokens=8)[0] == 2 and turns(*"1234", max_tokens=9)[0] == 3
    count, trajectory = turns(*"1234", finish=Finish.LENGTH)
    assert count == 1 and trajectory.finish is Finish.LENGTH and trajectory.reward == 1.0


class Halving(ScriptedSampler):
    """Guesses the middle of what is left, by the last character of the prompt."""

    low, high = 1, 15

    async def generate(self, request):
        said = self.tokenizer.decode(request.prompt_ids[-1:])
        if self.texts:
            last = int(self.texts[-1])
            self.low, self.high = (last + 1, self.high) if said == ">" else (self.low, last - 1)
        self.texts = (*self.texts, str((self.low + self.high) // 2))
        return await super().generate(request)


def test_guess_the_number_by_halving_never_fails(tokenizer):
    for seed in range(20):
        source = Source("guess_number", seed, {"size": 15, "guesses": 4, **BRIEF}).to_json()
        trajectory = play(tokenizer, Halving(tokenizer), source, first="1-15?")
        assert trajectory.reward == 1.0 == trajectory.components["found"]


@pytest.mark.parametrize(
    ("fault", "error", "line"),
    [
        ("raises", EnvironmentFailed, "own_environments:Countdown.step raised KeyError: 'lost'"),
        ("hangs", EnvironmentTimeout, "own_environments:Countdown.step ran longer than 0.2 s"),
        ((float("nan"),), EnvironmentFailed, "own_environments:Countdown.step: the reward is nan, not a finite number"),
        ((1e300,), EnvironmentFailed, "own_environments:Countdown.step: the reward is 1e+300, and training takes no more"),
        ((10**400,), EnvironmentFailed, "own_environments:Countdown.step: the reward is inf, not a finite number"),
        ((True,), EnvironmentFailed, "own_environments:Countdown.step: the reward is True, not a number"),
        (("1",), EnvironmentFailed, "own_environments:Countdown.step: the reward is str, not a number"),
        ("flag", EnvironmentFailed, "terminated is a str, not a bool"),
        ("four", EnvironmentFailed, "returned a tuple, not (observation, reward, terminated, truncated, info)"),
    ],
)
def test_what_an_environment_does_wrong_is_a_failure_of_its_kind(tokenizer, fault, error, line):
    with pytest.raises(error) as caught:
        play(tokenizer, ScriptedSampler(tokenizer, "1"), countdown(fault=fault), timeout=0.2)
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("source", "arguments", "line"),
    [
        (None, {}, "prompt 0/3: no field 'environment' that names an environment"),
        ({"nme": "x"}, {}, "prompt 0/3: field 'environment': missing a required argument: 'name'"),
        ({"name": "guess_number", "seed": 1}, {"credit": "x"}, "rollout.workflow_args.credit: 'x' is neither episode nor turn"),
        ({"name": "guess_number", "seed": 1}, {"max_turns": 0}, "rollout.workflow_args.max_turns: 0 (at least 1)"),
        ({"name": "guess_number", "seed": 1}, {"discount": -1}, "rollout.workflow_args.discount: -1 (in [0, 1])"),
        ({"name": "guess_number", "seed": 1}, {"max_tokens": 1.5}, "rollout.workflow_args.max_tokens: 1.5 (at least 1)"),
        ({"name": "guess_number", "seed": 1}, {"timeout": "9"}, "rollout.workflow_args.timeout: '9' (seconds, above 0)"),
    ],
)  # fmt: skip
def test_what_is_missing_is_refused_in_one_line(tokenizer, source, arguments, line):
    with pytest.raises(UserError) as caught:
        play(tokenizer, None, source, **arguments)
    assert str(caught.value).startswith(line)
    if "prompt 0/3" in line:  # told before a run as well, with the place of the record
        workflow = build_workflow("environment", tokenizer=tokenizer, rewards=None, arguments={})
        with pytest.raises(UserError, match=r"^a\.jsonl:1: (no )?field 'environment'"):
            check_prompts(workflow, [prompt_of(source)], lambda uid: "a.jsonl:1")
