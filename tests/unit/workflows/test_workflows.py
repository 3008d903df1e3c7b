"""Episodes against a scripted sampler: which tokens are trained on, and what the next request
holds.
"""

import asyncio
import dataclasses

import numpy as np
import pytest

from rljax.config.schema import GenerationConfig
from rljax.errors import RewardError, SamplerError, UserError
from rljax.hf.tokenizer import build_char_tokenizer, load_tokenizer
from rljax.rewards import Score
from rljax.rollout.trajectories import Episode, no_eos_ratio, supervised, trajectory_of
from rljax.types import PROMPT_VERSION, Completion, Finish, Group, Prompt, SamplingParams
from rljax.workflows import build_workflow, find_filter, sampling_params

PROMPT = Prompt("0/17", ({"role": "user", "content": "3+4="},), {"answer": "7"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("char")
    build_char_tokenizer(directory)
    return load_tokenizer(directory)


class ScriptedSampler:
    """Gives out completions in turn; its log-probs and versions say which token of which
    completion it was.
    """

    def __init__(self, *script):
        self.script = list(script)  # (token ids, finish)
        self.requests = []

    async def generate(self, request):
        turn = len(self.requests)
        self.requests.append(request)
        ids, finish = self.script[turn]
        logp = -np.arange(1, len(ids) + 1, dtype=np.float32) - 10 * turn
        return Completion(np.array(ids, np.int32), logp, np.full(len(ids), 5 + turn, np.int32), finish)


class ExactRewards:
    """The reward by hand: no process needed to say whether text is the answer."""

    def __init__(self):
        self.seen = []

    async def score(self, prompt, completion):
        self.seen.append(completion)
        if completion == "broken":
            raise RewardError("it broke")
        right = float(completion == prompt.fields["answer"])
        return Score(right, {"exact": right})


def episode(name, tokenizer, sampler, seed=3, params=SamplingParams(8), prompt=PROMPT, **arguments):
    rewards = ExactRewards()
    workflow = build_workflow(name, tokenizer=tokenizer, rewards=rewards, arguments=arguments)
    return asyncio.run(workflow.episode(sampler, prompt, params, seed)), rewards


@pytest.mark.parametrize("name", ["rlvr", "multi_turn"])
def test_padding_is_eos_and_the_eos_that_ends_a_completion_is_trained_on(tokenizer, name):
    eos = tokenizer.eos_token_id
    tokenizer_with_eos_padding = load_tokenizer(tokenizer.directory)
    tokenizer_with_eos_padding.pad_token_id = eos
    sampled = [*tokenizer.encode("7"), eos]
    sampler = ScriptedSampler((sampled, Finish.STOP))
    trajectory, rewards = episode(name, tokenizer_with_eos_padding, sampler)
    prompt_ids = tokenizer.encode("3+4=")
    assert trajectory.token_ids.tolist() == prompt_ids + sampled
    assert trajectory.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert trajectory.behavior_logp.tolist() == [0.0] * 4 + [-1.0, -2.0]
    assert trajectory.versions.tolist() == [PROMPT_VERSION] * 4 + [5, 5]
    assert (trajectory.reward, trajectory.components["exact"], trajectory.finish) == (1.0, 1.0, Finish.STOP)
    assert rewards.seen == ["7"]
    (request,) = sampler.requests
    assert request.prompt_ids.tolist() == prompt_ids and request.prompt_ids.dtype == np.int32 and request.seed == 3


def test_no_eos_ratio_is_by_finish_reason(tokenizer):
    eos = tokenizer.eos_token_id
    longest = ScriptedSampler(([*tokenizer.encode("1234567"), eos], Finish.STOP))
    cut = ScriptedSampler((tokenizer.encode("12"), Finish.LENGTH))
    trajectories = [episode("rlvr", tokenizer, sampler)[0] for sampler in (longest, cut)]
    assert no_eos_ratio(trajectories).value == 0.5
    assert no_eos_ratio([]).count == 0
    on_stop_string = ScriptedSampler((tokenizer.encode("12"), Finish.STOP))  # ended by itself with no EOS among its ids
    assert no_eos_ratio([episode("rlvr", tokenizer, on_stop_string)[0]]).value == 0.0


class OneTokenForTwo:
    """A tokenizer in which ids [1, 2] decode to "ab", which encodes to [3]."""

    eos_token_ids, eos_token_id, pad_token_id = (9,), 9, 0

    def __init__(self):
        self.words = {1: "a", 2: "b", 3: "ab", 4: "?", 5: "no", 9: ""}

    def encode(self, text):
        return {"ab": [3], "?": [4], "no": [5], "": []}[text]

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(self.words[int(i)] for i in token_ids)

    def encode_prompt(self, prompt):
        return [i for message in prompt.messages for i in self.encode(message["content"])]

    def next_turn(self, messages, last_token_id, *, tools=(), chat_template_kwargs=None):
        return self.encode(messages[-1]["content"])


def test_retokenization_of_neither_what_is_trained_on_nor_what_is_sent_again():
    tokenizer = OneTokenForTwo()
    prompt = Prompt("0/0", ({"role": "user", "content": "?"},), {"answer": "b"})
    sampler = ScriptedSampler(([1, 2, 9], Finish.STOP), ([1, 2, 9], Finish.STOP), ([2, 9], Finish.STOP))
    trajectory, rewards = episode("multi_turn", tokenizer, sampler, prompt=prompt, feedback="no", max_turns=5)
    assert [r.prompt_ids.tolist() for r in sampler.requests] == [[4], [4, 1, 2, 9, 5], [4, 1, 2, 9, 5, 1, 2, 9, 5]]
    assert trajectory.token_ids.tolist() == [4, 1, 2, 9, 5, 1, 2, 9, 5, 2, 9]
    assert trajectory.loss_mask.tolist() == [bool(m) for m in (0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1)]
    assert trajectory.versions.tolist() == [-1, 5, 5, 5, -1, 6, 6, 6, -1, 7, 7]
    assert trajectory.behavior_logp.tolist() == [0, -1, -2, -3, 0, -11, -12, -13, 0, -21, -22]
    assert rewards.seen == ["ab", "ab", "b"]
    assert trajectory.reward == 1.0 and trajectory.components == {"exact": 1.0, "turns": 3.0, "context_full": 0.0}
    assert len({r.id for r in sampler.requests}) == len({r.seed for r in sampler.requests}) == 3


def wrong(tokenizer, finish=Finish.STOP):
    return ([*tokenizer.encode("8"), tokenizer.eos_token_id], finish)


def test_turns_end_at_the_limit_at_success_when_cut_and_when_full(tokenizer):
    def turns(*script, **arguments):
        sampler = ScriptedSampler(*script)
        trajectory, _ = episode("multi_turn", tokenizer, sampler, feedback="no", **arguments)
        assert trajectory.components["turns"] == len(sampler.requests)
        return len(sampler.requests), trajectory

    right = ([*tokenizer.encode("7"), tokenizer.eos_token_id], Finish.STOP)
    assert turns(*[wrong(tokenizer)] * 9, max_turns=3)[0] == 3
    count, trajectory = turns(wrong(tokenizer), right, wrong(tokenizer), max_turns=3, turn_discount=0.5)
    assert count == 2 and trajectory.reward == 0.5 and trajectory.components["exact"] == 1.0
    count, trajectory = turns(wrong(tokenizer, Finish.LENGTH), right, max_turns=3)
    assert count == 1 and trajectory.finish is Finish.LENGTH
    # 4 tokens of prompt, 2 of a completion, 2 of feedback: the second turn ends at 10 tokens
    assert turns(*[wrong(tokenizer)] * 9, max_turns=9, max_tokens=10)[0] == 2
    assert turns(*[wrong(tokenizer)] * 9, max_turns=9, max_tokens=11)[0] == 3


@pytest.mark.parametrize("name", ["rlvr", "multi_turn"])
def test_failures_come_out_as_their_kind_and_never_as_a_zero(tokenizer, name):
    with pytest.raises(SamplerError):
        episode(name, tokenizer, ScriptedSampler((tokenizer.encode("7"), Finish.ABORT)))
    with pytest.raises(RewardError):
        episode(name, tokenizer, ScriptedSampler((tokenizer.encode("broken"), Finish.STOP)))


def test_the_users_own_workflow_and_what_is_wrong_with_one(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "own_workflow.py").write_text(
        "class Own:\n"
        "    def __init__(self, tokenizer, rewards, word='x'):\n        self.word = word\n"
        "    async def episode(self, sampler, prompt, params, seed):\n        return self.word\n"
        "class Plain(Own):\n"
        "    def episode(self, sampler, prompt, params, seed):\n        return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert episode("own_workflow:Own", tokenizer, None, word="y")[0] == "y"
    for name, arguments, line in (
        ("rlrv", {}, "rollout.workflow: no workflow named 'rlrv' (did you mean rlvr?"),
        ("own_workflow:On", {}, "rollout.workflow: own_workflow has no 'On' (did you mean Own?"),
        ("own_workflow:Plain", {}, "rollout.workflow: own_workflow:Plain has no 'async def episode'"),
        ("own_workflow:Own", {"wrod": 1}, "rollout.workflow_args: own_workflow:Own: got an unexpected keyword argument 'wrod'"),
        ("multi_turn", {"max_turns": 0}, "rollout.workflow_args.max_turns: 0 (at least 1)"),
        ("multi_turn", {"success": float("nan")}, "rollout.workflow_args.success: nan (a finite number)"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            episode(name, tokenizer, None, **arguments)
        assert str(caught.value).startswith(line)


def trajectory(reward, finish=Finish.STOP):
    completion = Completion(np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), finish)
    return trajectory_of([2], completion, reward, {})


MIXED = [((1, 0, 0, 0), True), ((0.5, 0.5, 0.25), True), ((0, 0), False), ((1, 1, 1), False), ((1,), False), ((), False)]


@pytest.mark.parametrize(("rewards", "mixed"), MIXED)
def test_nothing_to_train_in_groups_that_mixed_rewards_rejects(rewards, mixed):
    group = Group("0/0", tuple(trajectory(r) for r in rewards))
    assert find_filter("mixed_rewards")(group) is mixed
    assert find_filter(None)(group) is True
    with pytest.raises(UserError, match="no filter named 'mixed' "):
        find_filter("mixed")


@pytest.mark.parametrize(("rewards", "mixed"), MIXED)
def test_mixed_rewards_is_decided_on_what_is_trained(rewards, mixed):
    """Completions that were cut are not trained on with mask_no_eos, whatever their rewards."""
    cut = (trajectory(0.0, Finish.LENGTH), trajectory(1.0, Finish.LENGTH))
    group = Group("0/0", (*cut, *(trajectory(r) for r in rewards)))
    assert find_filter("mixed_rewards", mask_no_eos=True)(group) is mixed
    assert find_filter("mixed_rewards")(group) is True
    assert find_filter(f"{__name__}:count_of_two", mask_no_eos=True)(group) == (len(rewards) == 0)  # a user's sees all


def count_of_two(group):
    return len(group.trajectories) == 2


def test_an_episode_needs_a_prompt_and_a_completion():
    with pytest.raises(ValueError, match="at least one token"):
        Episode([])
    with pytest.raises(ValueError, match="nothing was sampled"):
        Episode([1]).trajectory(0.0, {})
    assert supervised([], [4, 5]).loss_mask.tolist() == [False, True]  # the first token has no context


def test_sampling_params_hold_every_eos_once(tokenizer):
    config = GenerationConfig(1, 8, 0, 0.6, 1.0, 0, False, ("\n",), (7, 2))
    params = sampling_params(config, tokenizer)
    assert params == SamplingParams(8, temperature=0.6, stop=("\n",), stop_token_ids=(2, 7))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"stop_token_ids": (7, 10**6)}, r"gconfig.stop_token_ids: 1000000 is no token \(the tokenizer's are 0 to 99\)"),
        ({"stop_token_ids": (-1,)}, "gconfig.stop_token_ids: -1 is no token"),
    ],
)
def test_what_can_never_stop_a_completion_is_refused(tokenizer, changes, line):
    config = GenerationConfig(1, 8, 0, 0.6, 1.0, 0, False, ("\n",), (7, 2))
    with pytest.raises(UserError, match=line):
        sampling_params(dataclasses.replace(config, **changes), tokenizer)
    sampling_params(dataclasses.replace(config, stop_token_ids=(tokenizer.vocab_size - 1,)), tokenizer)
