"""The workflow "agent": what an unmodified agent samples is what the learner is given."""

import asyncio
import dataclasses
import sys

import numpy as np
import pytest

from rljax import loop
from rljax.engine import Engine
from rljax.engines.fake import model
from rljax.engines.fake.learner import FakeLearner
from rljax.engines.fake.sampler import FakeSampler
from rljax.errors import AgentError, AgentTimeout, RequestLost, SamplerError, UserError
from rljax.rewards import Score
from rljax.rollout.producer import RetryingGenerator
from rljax.testing.harness import IN_MEMORY, MemorySink, make_config
from rljax.types import Prompt, SamplingParams
from rljax.workflows import build_workflow
from tests.unit.agents.endpoint_under_test import CALL, Script, make_tokenizer

AGENTS = "tests.unit.agents.agents_under_test"
PROMPT = Prompt("0/0", ({"role": "user", "content": "12*3?"},), {"answer": "36", "question": "12*3?"})

PROCESS = """
import json, os, sys, urllib.request
given = json.load(sys.stdin)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": given["messages"]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
reply = json.load(urllib.request.urlopen(request))
print("talked", file=sys.stderr)
print(json.dumps({"reward": float(given["data"]["answer"] in reply["choices"][0]["message"]["content"]), "words": 1}))
"""


class ByHand:
    """The reward of a config, which scores the last reply."""

    def __init__(self):
        self.seen = []

    async def score(self, prompt, completion):
        self.seen.append(completion)
        return Score(0.5, {"config": 0.5})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("plain"))


def speak(prompt):
    return "It is 36.<eos>" if "tool:36" in prompt or "tools:" not in prompt else f"{CALL}<eos>"


def run(tokenizer, agent="", *, says=speak, retries=None, rewards=None, **arguments):
    """Runs one episode, and returns its trajectories and the script."""
    script = Script(tokenizer, says)
    generator = script
    if retries is not None:
        generator = RetryingGenerator(script, timeout=5.0, retries=retries, lost=lambda error: None)
    given = arguments | ({"agent": f"{AGENTS}:{agent}"} if agent else {})
    workflow = build_workflow("agent", tokenizer=tokenizer, rewards=rewards or ByHand(), arguments=given)
    params = SamplingParams(256, stop_token_ids=tokenizer.eos_token_ids)
    return asyncio.run(workflow.episode(generator, PROMPT, params, 7)), script


@pytest.mark.parametrize("agent", ["calculator", "plain", "Framework"])
def test_agents_of_several_shapes(tokenizer, agent):
    (trajectory,), script = run(tokenizer, agent)
    assert trajectory.reward == 1.0
    sampled = np.concatenate([done.token_ids for done in script.completions])
    np.testing.assert_array_equal(trajectory.token_ids[trajectory.loss_mask], sampled)


def test_the_reward_of_the_config_scores_the_last_reply_of_an_agent_that_returns_nothing(tokenizer):
    rewards = ByHand()
    (trajectory,), _ = run(tokenizer, "silent", rewards=rewards)
    assert rewards.seen == ["It is 36."] and trajectory.reward == 0.5 and trajectory.components["config"] == 0.5


def test_rewards_by_turn_stand_where_nothing_is_returned(tokenizer):
    rewards = ByHand()
    found, _ = run(tokenizer, "by_turn", rewards=rewards, export_style="individual", turn_discount=0.5)
    assert [t.reward for t in found] == [0.75, 1.0] and not rewards.seen


def test_an_agent_in_a_process_of_its_own(tokenizer):
    (trajectory,), _ = run(tokenizer, command=[sys.executable, "-c", PROCESS], timeout=60)
    assert trajectory.reward == 1.0 and trajectory.components["words"] == 1


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit('out of\\nluck')", "status 1: luck"),
        ("print('good')", "no reward"),
        ("", "asked for no completion"),
    ],
)
def test_processes_that_fail(tokenizer, code, says):
    with pytest.raises(AgentError, match=says) as raised:
        run(tokenizer, command=[sys.executable, "-c", code])
    assert raised.value.__cause__ is not raised.value


def test_a_process_that_does_not_end_is_killed_with_its_children(tokenizer, tmp_path):
    alive = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.01)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with pytest.raises(AgentTimeout, match="longer than 2 s"):
        run(tokenizer, command=[sys.executable, "-c", code], timeout=2)
    assert alive.exists()
    alive.unlink()
    asyncio.run(asyncio.sleep(0.2))
    assert not alive.exists()


@pytest.mark.parametrize(
    ("agent", "error", "says"),
    [
        ("idle", AgentError, "asked for no completion"),
        ("raises", AgentError, "RuntimeError: no way"),
        ("slow", AgentTimeout, "longer than"),
        ("slow_thread", AgentTimeout, "longer than"),
        ("asks_too_much", AgentError, "temperature: this session samples with temperature 1"),
        ("wrong", AgentError, "the reward is str, not a number"),
    ],
)
def test_failures_have_a_kind(tokenizer, agent, error, says):
    with pytest.raises(error, match=says) as raised:
        run(tokenizer, agent, timeout=0.2 if "slow" in agent else 30.0)
    assert "\n" not in str(raised.value)


def test_a_lost_request_is_the_sampler_s_failure_and_not_the_agent_s(tokenizer):
    with pytest.raises(SamplerError, match="gone"):
        run(tokenizer, "silent", says=lambda prompt: RequestLost("gone"), retries=0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "either agent="),
        ({"agent": f"{AGENTS}:calculator", "command": ["true"]}, "either agent="),
        ({"agent": f"{AGENTS}:with_a_stranger"}, "takes 'engine'"),
        ({"agent": f"{AGENTS}:EXACT"}, "EXACT is a dict, not a function"),
        ({"agent": f"{AGENTS}:nothing"}, "nothing"),
        ({"command": ["no-such-program"]}, "command: no such program: no-such-program"),
        ({"command": "node agent.js"}, "command: 'node agent.js' .a tuple of texts"),
        ({"command": ["sleep", 1]}, "command: .'sleep', 1. .a tuple of texts"),
        ({"agent": f"{AGENTS}:calculator", "export_style": "both"}, "export_style: 'both'"),
        ({"agent": f"{AGENTS}:calculator", "tool_parser": "hermse"}, "hermes"),
        ({"agent": f"{AGENTS}:calculator", "timeout": 0}, "timeout: 0"),
        ({"agent": f"{AGENTS}:calculator", "turn_discount": 1.5}, r"turn_discount: 1\.5 \(in \[0, 1\]\)"),
    ],
)
def test_bad_arguments_are_named(tokenizer, arguments, says):
    with pytest.raises(UserError, match=says):
        build_workflow("agent", tokenizer=tokenizer, rewards=ByHand(), arguments=arguments)


def test_a_program_that_is_gone_since_the_start_is_named(tokenizer, tmp_path):
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    workflow = build_workflow("agent", tokenizer=tokenizer, rewards=ByHand(), arguments={"command": [str(program)]})
    program.unlink()
    with pytest.raises(UserError, match=f"{program}: No such file"):
        asyncio.run(workflow.episode(Script(tokenizer, speak), PROMPT, SamplingParams(8), seed=1))


# The whole loop --------------------------------------------------------------------------------------------------------


class RecordingSampler(FakeSampler):
    """The fake engine's sampler, whose words are a script's: all completions are kept."""

    def __init__(self, config, model_dir, script):
        super().__init__(config, model_dir)
        self._script = script
        self.completions = []

    async def generate(self, request):
        self.begin(request)
        done = await self._script.generate(request)
        versions = np.full(len(done.token_ids), self.version, np.int32)
        self.completions.append((request, dataclasses.replace(done, versions=versions)))
        return self.completions[-1][1]


class SeeingLearner(FakeLearner):
    """A learner that keeps the batches it is given."""

    def __init__(self, config, model_dir):
        super().__init__(config, model_dir)
        self.batches = []

    def update(self, batch):
        self.batches.append(batch)
        return super().update(batch)


class Products:
    """Prompts without end."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return dataclasses.replace(PROMPT, uid=f"0/{self.position - 1}")

    def __len__(self):
        return 4

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


def test_tokens_in_tokens_out_from_a_tool_calling_agent_to_the_learner(tmp_path, tokenizer):
    config = make_config({"gconfig.max_new_tokens": 128, "gconfig.n_samples": 2, "train_dataset.batch_size": 2,
                          "total_train_steps": 1, "actor.mb_spec.max_tokens_per_row": 512})  # fmt: skip
    model.make_model(tmp_path / "model", tokenizer.vocab_size)
    sampler = RecordingSampler(config, tmp_path / "model", Script(tokenizer, speak))
    learner, sinks = SeeingLearner(config, tmp_path / "model"), []
    run = loop.Run(
        config=config,
        engine=Engine(sampler, learner, IN_MEMORY, tmp_path / "publish"),
        prompts=Products(),
        workflow=build_workflow("agent", tokenizer=tokenizer, rewards=ByHand(), arguments={"agent": f"{AGENTS}:calculator"}),
        params=SamplingParams(128, stop_token_ids=tokenizer.eos_token_ids),
        open_sinks=lambda step: sinks.append(MemorySink(step)) or sinks[-1],
        workdir=tmp_path,
    )
    assert loop.train(run).finished
    (batch,) = learner.batches
    used = batch.loss_mask & (batch.segment_ids > 0)
    seen = np.stack([batch.token_ids, batch.behavior_logp.view(np.int32), batch.versions])[:, used]
    sampled = np.concatenate(
        [np.stack([done.token_ids, done.logp.view(np.int32), done.versions]) for _, done in sampler.completions], axis=1
    )
    assert sorted(map(tuple, seen.T.tolist())) == sorted(map(tuple, sampled.T.tolist()))
    assert seen.shape[1] == sum(len(done.token_ids) for _, done in sampler.completions) and len(sampler.completions) == 8

    # In order, each second prompt being the first with its completion and the tool's message
    for row in range(len(batch.token_ids)):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            ids = batch.token_ids[row][batch.segment_ids[row] == segment].tolist()
            first, second = [
                (request, done)
                for request, done in sampler.completions
                if ids[: len(request.prompt_ids) + len(done.token_ids)] == [*request.prompt_ids, *done.token_ids]
            ][-2:]
            assert ids == [*second[0].prompt_ids, *second[1].token_ids]
            assert second[0].prompt_ids[: len(first[0].prompt_ids)].tolist() == first[0].prompt_ids.tolist()
    metrics = sinks[0].steps[1]
    assert metrics["reward/called/avg"] == 1 and metrics["reward/turns/avg"] == 2 and metrics["reward/prefix_breaks/avg"] == 0
