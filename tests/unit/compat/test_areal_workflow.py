"""Workflows of AReaL's give the trajectories that the same episodes give here."""

import asyncio
import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from rljax.compat.areal import AsyncRewardWrapper, GenerationHyperparameters
from rljax.compat.areal_workflow import trajectory_of
from rljax.config.schema import GenerationConfig
from rljax.errors import RewardTimeout, UserError
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.rewards import Score
from rljax.rollout.producer import run_episode
from rljax.rollout.result import Failure
from rljax.types import Completion, Finish, Prompt
from rljax.workflows import build_workflow, sampling_params, scores_by_rewards

PROMPT = Prompt("0/17", ({"role": "user", "content": "3+4="},), {"answer": "7"})
ARRAYS = ("token_ids", "loss_mask", "behavior_logp", "versions")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("char")
    build_char_tokenizer(directory)
    return load_tokenizer(directory)


class Replies:
    """A generator that gives out texts in turn, with log-probs and versions that tell the tokens apart."""

    version = 6

    def __init__(self, tokenizer, *texts):
        self.tokenizer, self.texts, self.requests = tokenizer, texts, []

    async def generate(self, request):
        turn = len(self.requests)
        self.requests.append(request)
        ids = np.array([*self.tokenizer.encode(self.texts[turn]), self.tokenizer.eos_token_id], np.int32)
        logp = -np.arange(1, len(ids) + 1, dtype=np.float32) - 10 * turn
        return Completion(ids, logp, np.full(len(ids), 5 + turn, np.int32), Finish.STOP)


class Exact:
    reads_ids = False

    async def score(self, prompt, completion, sampled=None):
        assert prompt.uid == PROMPT.uid
        return Score(float(completion == prompt.fields["answer"]), {"exact": float(completion == prompt.fields["answer"])})


def episode(name, tokenizer, *texts, params=None, **arguments):
    trained = sampling_params(GenerationConfig(max_new_tokens=8), tokenizer)
    workflow = build_workflow(name, tokenizer=tokenizer, rewards=Exact(), arguments=arguments, params=trained)
    generator = Replies(tokenizer, *texts)
    result = asyncio.run(run_episode(workflow, generator, PROMPT, params or trained, 3, vocab_size=tokenizer.vocab_size))
    return result, generator.requests


@pytest.mark.parametrize("text", ["7", "8", ""])
def test_a_single_turn_gives_the_trajectory_of_rlvr(tokenizer, text):
    theirs, (asked,) = episode("areal_examples:SingleTurn", tokenizer, text)
    ours, (asked_here,) = episode("rlvr", tokenizer, text)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(theirs, name), getattr(ours, name))
        assert getattr(theirs, name).dtype == getattr(ours, name).dtype
    assert (theirs.reward, theirs.finish) == (ours.reward, ours.finish)
    assert theirs.components == {**ours.components, "length": len(text) + 1.0}
    np.testing.assert_array_equal(asked.prompt_ids, asked_here.prompt_ids)
    assert (asked.seed, asked.params) == (asked_here.seed, dataclasses.replace(asked_here.params, stop_token_ids=(2, 0)))


def test_several_turns_begin_with_the_tokens_so_far_and_train_on_the_sampled_ones(tokenizer):
    trajectory, requests = episode("areal_examples:Retry", tokenizer, "8", "7", max_turns=3)
    first = tokenizer.encode("3+4=")
    second = [*first, *tokenizer.encode("8"), tokenizer.eos_token_id, *tokenizer.encode("no")]
    assert [request.prompt_ids.tolist() for request in requests] == [first, second]
    assert trajectory.token_ids.tolist() == [*second, *tokenizer.encode("7"), tokenizer.eos_token_id]
    assert trajectory.versions.tolist() == [-1] * 4 + [5, 5] + [-1, -1] + [6, 6]
    assert trajectory.behavior_logp.tolist() == [0] * 4 + [-1, -2] + [0, 0] + [-11, -12]
    np.testing.assert_array_equal(trajectory.loss_mask, trajectory.versions >= 0)
    assert trajectory.components == {"turns": 2.0} and len({request.seed for request in requests}) == 2
    assert episode("areal_examples:Retry", tokenizer, "8", max_turns=1)[0] is None  # rejected


def test_an_evaluation_samples_with_its_own_parameters(tokenizer):
    trained = sampling_params(GenerationConfig(max_new_tokens=8), tokenizer)
    judged = dataclasses.replace(trained, greedy=True, top_p=0.5)
    _, (request,) = episode("areal_examples:SingleTurn", tokenizer, "7", params=judged)
    assert request.params == dataclasses.replace(judged, stop_token_ids=(2, 0))


def test_a_group_in_one_result_is_refused_with_what_to_return(tokenizer):
    failure, _ = episode("areal_examples:TwoRows", tokenizer, "7", "7")
    assert isinstance(failure, Failure)
    assert "input_ids of shape (2, 6): an episode returns one sequence, [1, T]" in failure.reason


def test_what_the_constructor_needs_and_is_not_given_is_named(tokenizer):
    with pytest.raises(UserError, match=r"rollout\.workflow_args: areal_examples:Needs: missing .*'max_turns'"):
        episode("areal_examples:Needs", tokenizer)


def test_only_a_workflow_that_is_given_the_rewards_has_its_records_checked(tokenizer):
    params = sampling_params(GenerationConfig(), tokenizer)
    parts = {"tokenizer": tokenizer, "rewards": Exact(), "params": params}
    assert scores_by_rewards(build_workflow("areal_examples:SingleTurn", arguments={}, **parts))
    assert not scores_by_rewards(build_workflow("areal_examples:Retry", arguments={"max_turns": 1}, **parts))


ROW = {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]], "logprobs": [[0, -1, -2]], "versions": [[-1, 4, 4]], "rewards": [1]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": None}, "no 'versions'"),
        ({"logprobs": [[0, -1]]}, r"logprobs of shape \(1, 2\) for input_ids of shape \(1, 3\)"),
        ({"rewards": [1, 2]}, "rewards of 2 values"),
        ({"rewards": float("nan")}, "rewards is nan, not a finite number"),
        ({"rewards": [1e300]}, r"rewards is 1e\+300, and training takes no more than"),
        ({"rewards": [10**400]}, "rewards is inf, not a finite number"),
        ({"rewards": ["1.0"]}, "rewards is str_, not a number"),
        ({"rewards": [None]}, "rewards is NoneType, not a number"),
        ({"loss_mask": [[1, 1, 1]]}, "token 0 has no context"),
        ({"input_ids": [1, 2, 3]}, r"input_ids of shape \(3,\)"),
    ],
)
def test_a_result_that_is_no_trajectory_says_what_is_wrong(changes, words):
    returned = {name: value for name, value in (ROW | changes).items() if value is not None}
    with pytest.raises(ValueError, match=words):
        trajectory_of(returned, {}, Finish.STOP)


def test_padding_is_left_out_by_the_attention_mask_wherever_it_stands():
    plain = trajectory_of(ROW, {}, Finish.STOP)
    for left, right in ((2, 0), (0, 3), (1, 1)):
        padded = {n: np.pad(np.array(v), ((0, 0), (left, right)), constant_values=9) for n, v in ROW.items() if n != "rewards"}
        mask = np.pad(np.ones((1, 3)), ((0, 0), (left, right)))
        other = trajectory_of({**padded, "rewards": 1.0, "attention_mask": mask}, {}, Finish.STOP)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(other, name), getattr(plain, name))


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.6), ("top_p", 0.9), ("frequency_penalty", 0.1), ("n_samples", 2)]
)
def test_a_request_that_the_learner_would_score_otherwise_is_refused(tokenizer, monkeypatch, name, value):
    monkeypatch.setattr(GenerationHyperparameters, "new", lambda self, **_: dataclasses.replace(self, **{name: value}))
    failure, requests = episode("areal_examples:SingleTurn", tokenizer, "7")
    assert not requests and f"gconfig.{name}={value} of a request" in failure.reason


def test_a_reward_of_the_workflows_own_that_hangs_or_fails_is_no_zero():
    def fails():
        calls.append(1)
        raise LookupError("mine")

    calls = []
    with pytest.raises(RewardTimeout):
        asyncio.run(AsyncRewardWrapper(lambda: time.sleep(0.3), timeout_seconds=0.05)())
    with pytest.raises(LookupError):
        asyncio.run(AsyncRewardWrapper(fails, max_retries=2)())
    assert len(calls) == 3
