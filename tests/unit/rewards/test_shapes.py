"""Reward functions of AReaL's, TRL's and verl's shapes, as their users write them, in the processes."""

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from rljax.config import checks
from rljax.config.schema import Config, RewardConfig
from rljax.errors import Rejected, RewardError, UserError
from rljax.rewards import RewardPool
from rljax.rewards.process_main import Scorer
from rljax.rewards.score import Sampled, Score, score_of, weighted
from rljax.rewards.shapes import AREAL, BY_NAME, RLJAX, TRL, VERL, find_rewards
from rljax.rollout.gathering import Gathering
from rljax.types import Prompt

TEXT = Prompt("0/3", ({"role": "user", "content": "What is 3+4="},), {"answer": "3+4 is 7\n#### 7", "ground_truth": "7"})
CHAT = Prompt("0/3", TEXT.messages, {"prompt": [dict(m) for m in TEXT.messages], "solution": "7"})
ROW = Prompt(
    "0/0", TEXT.messages, {"data_source": "openai/gsm8k", "ground_truth": "7", "extra_info": {"index": 0}, "ability": "math"}
)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def sampled_of(completion):
    return Sampled([9, 4], [ord(c) for c in completion], "What is 3+4=?", f"{completion}<eos>")


def scored(names, prompt, *completions, weights=(), group=False):
    """Scores completions by rewards as a reward process does, each alone or all as a group."""
    scorer = Scorer(find_rewards([f"shaped_rewards:{name}" for name in names]), weights or [1.0] * len(names))
    samples = [(completion, dataclasses.asdict(sampled_of(completion))) for completion in completions]
    jobs = [samples] if group else [[sample] for sample in samples]
    wire = [json.loads(json.dumps({"prompt": dataclasses.asdict(prompt), "samples": job})) for job in jobs]
    return [score for job in wire for score in asyncio.run(scorer.scores(job))]


def by_pool(name, prompt, *completions, ids=True):
    """Scores completions as a group's episodes do, in a real pool; what raises is returned."""

    async def main():
        reward = RewardConfig(f"shaped_rewards:{name}", workers=1, timeout=20.0, retries=0)
        async with RewardPool(reward) as rewards:
            together = Gathering(len(completions))

            async def one(completion):
                with together.member():
                    return await rewards.score(prompt, completion, sampled_of(completion) if ids else None)

            return await asyncio.gather(*map(one, completions), return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "shape", "is_async", "reads"),
    [
        ("areal_gsm8k", AREAL, False, ("answer",)),
        ("areal_judge", AREAL, True, ()),
        ("trl_accuracy", TRL, False, ("solution",)),
        ("trl_format", TRL, False, ()),
        ("trl_shortest", TRL, True, ()),
        ("trl_standard", TRL, False, ("ground_truth",)),
        ("trl_length", TRL, False, ()),
        ("compute_score", VERL, False, ("data_source", "ground_truth")),
        ("verl_plain", VERL, False, ("ground_truth",)),
        ("verl_async", VERL, True, ("data_source", "ground_truth")),
        ("own", RLJAX, False, ()),
        ("own_by_position", RLJAX, False, ()),
        ("partial_own", RLJAX, False, ()),
        ("bound_gold", RLJAX, False, ()),
        ("instance", RLJAX, False, ()),
        ("by_name", BY_NAME, False, ()),
        ("half_by_name", BY_NAME, False, ()),
    ],
)
def test_a_shape_is_told_by_the_names_of_parameters(name, shape, is_async, reads):
    (reward,) = find_rewards([f"shaped_rewards:{name}"])
    assert (reward.shape, reward.is_async, reward.reads) == (shape, is_async, reads)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mixed", "takes (prompt, completions, **kwargs), which is none of the shapes of a reward"),
        ("nothing", "takes (*args, **kwargs), which is none of the shapes"),
        (
            "two_shapes",
            "which may be (data_source, solution_str, ground_truth, extra_info) or (prompts, completions, **columns)",
        ),
        ("three", "takes (a, b, c), which is none of the shapes"),
        ("by_name_and_more", "takes (*, prompt, completion, answer), which is none of the shapes"),
        ("response_first", "(response, answer), and would be called as (prompt, completion) by position, which 'response'"),
        ("swapped", "(completion, prompt), and would be called as (prompt, completion) by position, which 'completion'"),
        ("with_gold", "(prompt, answer), and would be called as (prompt, completion) by position, which 'answer'"),
        (
            "kept_gold",
            "(prompt, completion, answer='7'), and would be called as (prompt, completion) by position, which 'answer'",
        ),
    ],
)
def test_a_signature_of_no_shape_or_of_several_is_refused_with_the_shapes_there_are(name, words):
    with pytest.raises(UserError) as caught:
        find_rewards([f"shaped_rewards:{name}"])
    message = str(caught.value)
    assert message.startswith(f"reward.name: shaped_rewards:{name} takes ") and words in message and "\n" not in message
    assert all(shape.signature in message for shape in (RLJAX, AREAL, TRL, VERL))


def test_parameters_that_are_given_by_name_alone_get_what_they_name():
    for name in ("by_name", "half_by_name"):
        assert [score.reward for score in scored([name], TEXT, "7", "8")] == [1.0, 0.0]


def test_a_class_is_refused_and_an_instance_is_called():
    with pytest.raises(UserError, match=r"shaped_rewards:Instance is a class, .*`score = Instance\(\)` in shaped_rewards"):
        find_rewards(["shaped_rewards:Instance"])
    assert [score.reward for score in scored(["instance"], TEXT, "7")] == [0.5]


@pytest.mark.parametrize("name", ["forgot_await", "forgot_await_twice"])
@pytest.mark.filterwarnings("error")  # Python's own, of a coroutine that was never awaited
def test_a_coroutine_that_a_reward_returns_is_an_error_that_says_what_to_do(name):
    with pytest.raises(ValueError, match=f"{name} returned a coroutine, not a number .make it `async def`"):
        scored([name], TEXT, "7")


def test_what_only_trls_trainer_passes_is_told_from_a_column_that_is_missing():
    (reward,) = find_rewards(["shaped_rewards:trl_of_trainer"])
    fault = reward.fault(TEXT)
    assert fault.lacks_field
    assert fault.reason == "trl_of_trainer takes trainer_state, which TRL's trainer has and rljax does not (give it a default)"


def test_areals_are_called_with_text_ids_and_the_record():
    right, wrong = scored(["areal_gsm8k"], TEXT, "#### 7", "#### 8")
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    (judged,) = scored(["areal_judge"], TEXT, "abc")
    assert judged == Score(3.0, {"prompt_tokens": 2.0, "asked": 1.0})


def test_trls_get_messages_where_the_records_prompt_has_them_and_text_otherwise():
    assert [s.reward for s in scored(["trl_format"], CHAT, "<think>a</think> 7", "7")] == [1.0, 0.0]
    assert [s.reward for s in scored(["trl_standard"], TEXT, "7", "8")] == [1.0, 0.0]


def test_a_reward_of_none_does_not_apply_and_rejects_the_sample():
    (applies,) = scored(["trl_accuracy"], CHAT, "it is 7")
    assert applies.reward == 1.0
    unknown = Prompt("0/4", CHAT.messages, {**CHAT.fields, "solution": None})
    assert scored(["trl_accuracy"], unknown, "it is 7") == [None]
    both = scored(["trl_accuracy", "trl_format"], unknown, "<think>a</think>")
    assert both == [Score(1.0, {"trl_format": 1.0})]  # what does not apply adds nothing
    assert scored(["rejects"], TEXT, "x") == [None]


def test_a_function_of_lists_sees_the_completions_of_its_group_and_alone_just_its_own():
    texts = ["aaa", "a", "aa", "b"]
    assert [s.reward for s in scored(["trl_shortest"], CHAT, *texts, group=True)] == [0.0, 1.0, 0.0, 1.0]
    assert [s.reward for s in scored(["trl_shortest"], CHAT, *texts)] == [1.0] * 4


def test_a_pool_asks_once_for_a_group_and_rejects_what_no_reward_applies_to():
    assert [s.reward for s in by_pool("trl_shortest", CHAT, "aaa", "a", "aa", "b")] == [0.0, 1.0, 0.0, 1.0]
    (without,) = by_pool("trl_shortest", CHAT, "a", ids=False)
    assert isinstance(without, RewardError) and "reads token ids, and the workflow gives none" in str(without)
    unknown = Prompt("0/4", CHAT.messages, {**CHAT.fields, "solution": None})
    assert [type(outcome) for outcome in by_pool("trl_accuracy", unknown, "a", "b")] == [Rejected, Rejected]


def test_another_number_of_rewards_than_completions_is_an_error():
    with pytest.raises(ValueError, match=r"trl_wrong_count returned \[1.0\], not a list of 2 rewards"):
        scored(["trl_wrong_count"], CHAT, "a", "b", group=True)


def test_verls_score_is_the_reward_and_text_beside_it_is_no_component():
    right, wrong = scored(["compute_score"], ROW, "so #### 7", "7")
    assert right == Score(1.0, {"acc": 1.0}) and wrong == Score(0.0, {"acc": 0.0})
    assert scored(["verl_async"], ROW, "7")[0].reward == 1.0


def test_several_rewards_are_a_weighted_sum_with_a_component_each():
    names, weights = ["trl_format", "areal_judge", "trl_length"], (1.0, 0.5, 2.0)
    text = "<think>7</think>"
    (total,) = scored(names, CHAT, text, weights=weights)
    alone = [scored([name], CHAT, text)[0].reward for name in names]
    assert total.reward == pytest.approx(sum(w * r for w, r in zip(weights, alone, strict=True)))
    assert total.components == {
        "trl_format": alone[0], "areal_judge": alone[1], "trl_length": alone[2],
        "areal_judge/prompt_tokens": 2.0, "areal_judge/asked": 1.0,
    }  # fmt: skip


def test_the_weighted_sum_does_not_depend_on_the_order_of_the_rewards():
    scores = {"a": Score(1.0, {"x": 2.0}), "b": Score(0.5, {"b": 0.5}), "c": None}
    weights = {"a": 1.0, "b": -2.0, "c": 7.0}
    sums = {
        repr(sorted(weighted(order, [weights[n] for n in order], [scores[n] for n in order]).components.items()))
        for order in itertools.permutations(scores)
    }
    assert sums == {repr([("a", 1.0), ("a/x", 2.0), ("b", 0.5)])}
    assert weighted(["c"], [7.0], [None]) is None


def test_a_mapping_has_its_total_under_one_of_two_names():
    assert score_of({"score": 1, "pred": "7", "acc": True, "note": None}) == Score(1.0, {"acc": 1.0})
    with pytest.raises(ValueError, match="'pred'"):
        score_of({"reward": 1, "pred": "7"})  # text is no component of a reward of ours


def test_weights_and_names_that_do_not_match_are_refused():
    for reward, words in (
        (RewardConfig("exact,math", weights=(1.0,)), "reward.weights: "),
        (RewardConfig("exact,exact"), "names a reward twice"),
        (RewardConfig("exact,"), "none between two commas"),
    ):
        with pytest.raises(UserError, match=words):
            checks.check_values(dataclasses.replace(Config(), reward=reward))


def test_what_a_reward_reads_is_known_before_the_run():
    def faults(name, *prompts):
        return Scorer(find_rewards([name]), [1.0]).faults([dataclasses.asdict(prompt) for prompt in prompts])

    found = faults("gsm8k", TEXT, Prompt("0/1", TEXT.messages, {"final": "7"}), Prompt("0/2", TEXT.messages, {"final": "?"}))
    assert found.keys() == {0, 2}
    assert found[0] == ("gsm8k reads the field 'final', and the record has: answer, ground_truth", True)
    assert found[2].lacks_field is False and "'?' is not understood" in found[2].reason
    assert faults("shaped_rewards:trl_accuracy", CHAT, TEXT).keys() == {1}
    assert faults("shaped_rewards:own", TEXT) == {}  # says nothing of what it reads
    with pytest.raises(KeyError, match=r"no field 'anser' \(the record has: answer, ground_truth\)"):
        scored(["reads_what_is_not_there"], TEXT, "7")
