"""Shipped rewards on texts whose score is plain."""

import pytest

from rljax.data.tasks import make_task
from rljax.errors import Rejected
from rljax.rewards import exact, mathematics, reasoning_gym
from rljax.rewards.score import score_of
from rljax.types import Prompt


def prompt(**fields):
    return Prompt("0/0", ({"role": "user", "content": "?"},), fields)


@pytest.mark.parametrize(("completion", "right"), [("46", 1), (" 46\n", 1), ("4 6", 0), ("046", 0), ("46.", 0), ("", 0)])
def test_exact_forgives_space_around_and_nothing_else(completion, right):
    assert exact.reward(prompt(answer="46"), completion) == {"reward": right, "exact": right}


@pytest.mark.parametrize(
    "completion",
    [
        "She sold 48/2 = <<48/2=24>>24 clips.\n#### 72",
        "#### $72.00",
        "#### 72 clips\nThat is 3 more than 69.",  # the marker's line is the answer, not the last number
        "The answer is \\boxed{72}.",
        "The answer is $72$.",
        "so x = 72",
        "72",
        "In total \\boxed{\\frac{144}{2}} clips",
        "The answer is 72 because 3 > 2",
    ],
)
def test_gsm8k_finds_the_final_answer(completion):
    assert mathematics.gsm8k_reward(prompt(final="72"), completion)["reward"] == 1.0
    assert mathematics.gsm8k_reward(prompt(final="71"), completion)["reward"] == 0.0


@pytest.mark.parametrize("completion", ["", "no idea", "72 and then 73", "#### 7 2", "-72", "720", "####", "\\boxed{", "\x00"])
def test_gsm8k_gives_nothing_for_another_answer_or_none(completion):
    assert mathematics.gsm8k_reward(prompt(final="72"), completion)["reward"] == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "right"), [("18", "9 + 9 = 18", 1), ("18", "9 + 9 = 17", 0), ("-3", "It is -3.", 1)]
)
def test_math_holds_the_final_answer_against_the_answer_field(answer, completion, right):
    assert mathematics.reward(prompt(answer=answer), completion) == {"reward": right, "math": right}


@pytest.mark.parametrize("text", ["#### {}", "The answer is {}.", "\\boxed{{{}}}", "It is {}", "x = {}", "#### {} degrees"])
def test_a_minus_sign_is_a_minus_as_a_hyphen_is(text):
    for written in ("-5", "\N{MINUS SIGN}5"):
        assert mathematics.gsm8k_reward(prompt(final="-5"), text.format(written))["reward"] == 1.0
        assert mathematics.gsm8k_reward(prompt(final="5"), text.format(written))["reward"] == 0.0
        assert mathematics.reward(prompt(answer=written), text.format("-5"))["reward"] == 1.0


@pytest.mark.parametrize("question", ["9 + 9", "3 * 6", "$2 \\times 9$", "20 - 2", "To find 9 + 9, we", "so x = 9 + 9"])
def test_math_gives_nothing_for_the_question_said_again(question):
    assert mathematics.reward(prompt(answer="18"), question)["reward"] == 0.0
    assert mathematics.reward(prompt(answer="18"), f"{question} = 18")["reward"] == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"), [("0.5", "1/2"), ("-3/4", "\\boxed{-\\frac{3}{4}}"), ("0.5", "50%"), ("$x + 1$", "$1 + x$")]
)
def test_math_knows_the_ways_to_write_a_number_and_answers_that_are_none(answer, completion):
    assert mathematics.reward(prompt(answer=answer), completion)["reward"] == 1.0


def test_gsm8k_reads_thousands_and_refuses_a_gold_answer_that_is_no_number():
    assert mathematics.gsm8k_reward(prompt(final="1234567"), "#### 1,234,567")["reward"] == 1.0
    with pytest.raises(Rejected, match="is not understood as mathematics"):
        mathematics.gsm8k_reward(prompt(final="?"), "#### 1")


@pytest.mark.parametrize("dataset", ["basic_arithmetic", "letter_counting", "acre"])
def test_reasoning_gym_scores_by_the_datasets_own_scorer(dataset):
    records = make_task(f"task:reasoning_gym/{dataset}", "train", {"n": 3}, "train_dataset")
    for record in (records[i] for i in range(3)):
        one = prompt(**record)
        assert reasoning_gym.reward(one, record["answer"])["reward"] == 1.0
        tagged = f"<answer>no</answer> I think again: <answer>{record['answer']}</answer>, I am sure"
        assert reasoning_gym.reward(one, tagged)["reward"] == 1.0
        assert reasoning_gym.reward(one, "<answer>neither</answer>")["reward"] < 1.0


def test_reasoning_gym_notices_that_the_question_is_another_one():
    record = make_task("task:reasoning_gym/basic_arithmetic", "train", {"n": 1}, "train_dataset")[0]
    with pytest.raises(ValueError, match="another question"):
        reasoning_gym.reward(prompt(**{**record, "question": "What is 1 + 1?"}), "2")


def test_score_of_takes_numbers_of_any_kind_and_nothing_else():
    import numpy as np

    for value in (1, True, 1.0, np.float32(1), np.array(1.0)):
        assert score_of(value).reward == 1.0
    assert score_of({"reward": 2, "a": 0.5}).components == {"a": 0.5}
    for wrong in (None, "1", [1.0], float("inf"), {"a": 1.0}, {"reward": 1.0, "a": "x"}):
        with pytest.raises(ValueError):
            score_of(wrong)
    largest = float(np.finfo(np.float32).max)
    assert score_of(-largest).reward == -largest
    for wrong in (1e300, -1e300, {"reward": 1.0, "a": 1e300}):
        with pytest.raises(
            ValueError, match=r"^(the reward|component 'a') is -?1e\+300, and training takes no more than 3.4e\+38"
        ):
            score_of(wrong)


@pytest.mark.parametrize(
    ("gold", "completion", "right"),
    [
        ("6 - 5i", "$\\boxed{6 - 5i}$", 1),
        ("6 - 5i", "$\\boxed{5}$", 0),
        ("2k", "\\boxed{2}", 0),
        ("2k", "\\boxed{2k}", 1),
        ("12\\sqrt{3}", "\\boxed{12}", 0),
        ("x+1", "\\boxed{1+x}", 1),
        ("[0,1)", "\\boxed{[0,1)}", 1),
        ("10^{-3}", "\\boxed{0.001}", 1),
        ("$$18$$", "18", 1),
        ("18 dollars", "\\boxed{18}", 1),
        ("$18.00", "#### 18", 1),
        ("-72", "72", 0),
        ("\\boxed{18}", "18", 1),
    ],
)
def test_a_gold_answer_is_mathematics_with_or_without_dollars(gold, completion, right):
    assert mathematics.reward(prompt(answer=gold), completion)["reward"] == right


@pytest.mark.parametrize(
    ("gold", "completion", "right"),
    [
        ("18", "#### Step 2: conclude\n$$\\boxed{18}$$", 1),
        ("18", "#### Step 18\n\\boxed{5}", 0),
        ("18", "#### US$18", 1),
        ("18", "#### +18", 1),
        ("-18", "#### -$18", 1),
        ("18", "#### -$18", 0),
        ("18", "#### **18**", 1),
        ("18", "#### $18$", 1),
        ("18", "####18 (for 3 days)", 1),
        ("18", "#### 9 + 9 = 18", 1),
        ("9", "#### 9 + 9", 0),
        ("1000", "#### 1,000.", 1),
        ("0.5", "#### 1/2", 1),
        ("5", "#### 18\nno:\n#### 5\n#### Step 18", 1),
    ],
)
def test_four_hashes_count_where_a_number_follows(gold, completion, right):
    assert mathematics.reward(prompt(answer=gold), completion)["reward"] == right


@pytest.mark.parametrize(
    "last", ["\\boxed{18}", "\\boxed{17} no wait \\boxed{18}", "\\boxed{18} \\boxed{", "\\boxed{\\frac{36}{2}}"]
)
def test_the_last_box_that_is_closed_wins(last):
    assert mathematics.reward(prompt(answer="18"), last)["reward"] == 1.0
    assert mathematics.reward(prompt(answer="17"), last)["reward"] == 0.0


@pytest.mark.parametrize("hedge", ["#### 17 or 18", "#### 17, 18", "#### 17 18", "It is 17 or 18.", "\\boxed{17 or 18}"])
def test_a_hedge_is_no_answer(hedge):
    for gold in ("17", "18"):
        assert mathematics.reward(prompt(answer=gold), hedge)["reward"] == 0.0
    assert mathematics.reward(prompt(answer="18"), hedge.replace("17", "18"))["reward"] == 1.0


def test_a_gold_answer_that_is_not_understood_rejects_its_samples_and_is_known_at_the_start():
    for gold in ("?", "", "See the figure."):
        with pytest.raises(Rejected):
            mathematics.reward(prompt(answer=gold), "18")
        with pytest.raises(ValueError, match="is not understood as mathematics"):
            mathematics.reward.check(prompt(answer=gold))
    mathematics.reward.check(prompt(answer="\\text{east}"))
