"""The verifiers on answers of the shapes of MATH, in the forms that models write: what is scored
wrongly is known, case by case."""

import pytest

from rljax.errors import Rejected
from rljax.experiments.bench import verifiers
from rljax.experiments.bench.verifier_cases import SHAPES, boxed
from rljax.experiments.bench.verifier_forms import FORMS
from rljax.rewards.mathematics import gsm8k_reward, reward
from rljax.types import Prompt

# What math-verify itself says of them, and sums, powers and products that are to be worked out
MISSED = {("1000", "10^3"), ("2k", "k+k"), ("3i", "0+3i")}
PASSED = {("(1,2)", "\\{1,2\\}")}


def test_what_is_scored_wrongly_is_known():
    rows = list(verifiers.math_rows())
    errors = {error for row in rows for error in row.errors}
    expected = [("missed", *case) for case in MISSED] + [("passed", *case) for case in PASSED]
    assert errors == {f"  {kind}: gold {gold!r}, completion {boxed(answer)[0]!r}" for kind, gold, answer in expected}
    assert {row.shape.removeprefix("math: ") for row in rows} == SHAPES.keys() | FORMS.keys()


@pytest.mark.parametrize("repeated", ["(", "{", "[", "\\sqrt{", "\\frac{1}{", "1", "1 ", "\\boxed{", "1 or ", "not ", "#### 1"])
@pytest.mark.parametrize("form", ["\\boxed{%s}", "$%s$", "%s"])
def test_what_a_collapsed_policy_repeats_is_no_answer_at_once(repeated, form):
    prompt = Prompt("0/0", ({"role": "user", "content": "?"},), {"final": "18"})
    assert gsm8k_reward(prompt, form % (repeated * 3000))["reward"] == 0


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("<think>#### 5</think>\nThe answer is 18", 1),
        ("\\boxed{18}</think> The final answer is 17", 0),
        ("#### 17</think>", 0),
        ("The answer is 18 and not 17.", 1),
        ("I am sure it is not 18.", 0),
        ("$\\boxed{\\text{18 dollars}}$", 1),
        ("Answer: \\$18", 1),
    ],
)
def test_the_answer_is_what_the_model_commits_to(completion, right):
    prompt = Prompt("0/0", ({"role": "user", "content": "?"},), {"final": "18"})
    assert gsm8k_reward(prompt, completion)["reward"] == right


@pytest.mark.parametrize(
    ("gold", "right"),
    [
        ("Give the answer as a percentage: 32 / 96 * 100% = 33.333...%, so 33%\n#### 33", "33"),
        ("Add the fee to the answer from before for the total: $4.00 + $2.00 = $<<4+2=6.00>>6.00\n#### 6", "6"),
        ("So it is $\\boxed{\\frac{1}{2}}$, as $x = 2y$.", "\\frac12"),
    ],
)
def test_of_a_worked_solution_the_gold_answer_is_what_it_ends_with(gold, right):
    prompt = Prompt("0/0", ({"role": "user", "content": "?"},), {"answer": gold})
    assert [reward(prompt, boxed(answer)[0])["reward"] for answer in (right, "7")] == [1, 0]


@pytest.mark.parametrize("zero", ["\N{FULLWIDTH DIGIT ZERO}", "\N{ARABIC-INDIC DIGIT ZERO}", "\N{DEVANAGARI DIGIT ZERO}"])
def test_digits_of_all_scripts_are_digits(zero):
    written = str.maketrans({str(digit): chr(ord(zero) + digit) for digit in range(10)})
    for said in (lambda answer: answer, lambda answer: answer.translate(written)):
        for gold in ("42", "1234.5", "-7/2"):
            prompt = Prompt("0/0", ({"role": "user", "content": "?"},), {"answer": gold.translate(written)})
            reward.check(prompt)  # as every record is before the run
            assert [reward(prompt, f"The answer is {said(answer)}.")["reward"] for answer in (gold, "5")] == [1, 0]


@pytest.mark.parametrize("gold", ["\N{VULGAR FRACTION ONE HALF}", "\N{CIRCLED DIGIT FOUR}", ""])
def test_a_record_passes_its_check_if_its_samples_are_not_rejected(gold):
    prompt = Prompt("0/0", ({"role": "user", "content": "?"},), {"answer": gold})
    with pytest.raises(ValueError, match="is not understood"):
        reward.check(prompt)
    with pytest.raises(Rejected):
        reward(prompt, "The answer is 4.")
