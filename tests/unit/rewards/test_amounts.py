"""Numbers with units around them: any noun may stand there, and no word that makes another number."""

import pytest
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from rljax.rewards import units
from rljax.rewards.amounts import amount_of
from rljax.rewards.mathematics import answer_of, gsm8k_reward, reward
from rljax.types import Prompt

PHASES = (Phase.explicit, Phase.generate)  # a smaller example takes minutes where math-verify multiplies letters
# Words of any language that are read by syllables, as no list of nouns has them
SYLLABLES = st.builds(str.__add__, st.sampled_from("bcdfghjklmnprstvw"), st.sampled_from("aeiou"))
NOUNS = st.builds(
    lambda parts, ending: "".join(parts) + ending, st.lists(SYLLABLES, min_size=2, max_size=5), st.sampled_from("srn")
)
NAMED = """dollars dollar eggs people boxes USD weeks slices euros bolts books pages kids cookies grams ounces cups points cars
apples miles hours cents men gyms days cm h quarters pairs degrees times man-hours café buses crypts"""
WORDS = NOUNS.filter(lambda noun: not {noun} & units.MODIFIERS) | st.sampled_from(NAMED.split())
LINES = ["\\boxed{%s}", "#### %s", "The answer is %s.", "So \\fbox{%s}"]
FORMS = [
    "{n} {w}",
    "{n}~{w}",
    "{n}\\text{{ {w}}}",
    "\\text{{{n} {w}}}",
    "\\${n} {w}",
    "{n} {w} per day",
    "{n}\\ \\mathrm{{{w}}}",
]


def score(gold, completion, question="?"):
    prompt = Prompt("0/0", ({"role": "user", "content": question},), {"answer": gold, "final": gold})
    scores = {function(prompt, completion)["reward"] for function in (reward, gsm8k_reward)}
    assert len(scores) == 1
    return scores.pop()


def box(answer):
    return f"Therefore it is $\\boxed{{{answer}}}$."


@settings(max_examples=150, deadline=None, phases=PHASES)
@given(WORDS, st.integers(-999, 9999), st.integers(-999, 9999), st.sampled_from(FORMS))
def test_a_number_in_a_box_is_that_number_whatever_its_unit(word, number, other, form):
    assume(number != other and not (len(word) == 1 and "text" not in form and "mathrm" not in form))
    said = box(form.format(n=number, w=word))
    assert score(str(number), said) == 1
    assert score(str(other), said) == 0
    assert answer_of(said) == str(number)


@settings(max_examples=60, deadline=None, phases=PHASES)
@given(
    NOUNS,
    st.integers(0, 9999),
    st.sampled_from(["{w}: {n}", "{w} = {n}", "\\text{{{w}: }}{n}", "{w} {n}", "{w}: \\${n}", "USD {n}"]),
)
@example("total", 18, "\\text{{\\$}}{n}")
def test_words_before_a_number_are_its_label(word, number, form):
    assert score(str(number), box(form.format(n=number, w=word.capitalize()))) == 1
    assert score(str(number + 1), box(form.format(n=number, w=word.capitalize()))) == 0


MAKES_ANOTHER = sorted(units.MODIFIERS - {"or", "plus", "minus"}) + [
    "and a half",
    "and a third",
    "and one quarter",
    "or so",
    "squared meters",
    "dozen eggs",
    "\\%",
]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("word", [*MAKES_ANOTHER, "percent", "x", "k", "xy", "or 19", "to 20"])
def test_a_word_that_changes_the_number_makes_another_answer(word, line):
    for form in ("{} {}", "{}\\text{{ {}}}"):
        assert score("18", line % form.format(18, word)) == 0


@pytest.mark.parametrize(
    "word", ["18x", "18xy", "18ab", "18k", "x18", "Total - 18", "half 18", "\\text{not }18", "18!", "18²", "18^2"]
)
def test_an_expression_is_no_amount(word):
    assert amount_of(word) is None
    assert score("18", box(word)) == 0


def test_a_word_that_changes_the_number_is_right_where_the_gold_answer_has_it():
    assert [score("18 dozen", box(said)) for said in ("18 dozen eggs", "18\\text{ dozen}", "18", "19 dozen")] == [1, 1, 1, 0]
    assert [score("18 thousand", box(said)) for said in ("18000", "18 thousand people")] == [1, 1]


@pytest.mark.parametrize("said", ["18\\%", "18%", "18 percent", "18\\text{ percent}"])
@pytest.mark.parametrize("line", LINES)
def test_a_percentage_is_its_hundredth_or_what_a_question_about_percent_asks_for(said, line):
    assert score("0.18", line % said) == score("18\\%", line % said) == 1
    for question in ("What percentage is left?", "How many % are left?"):
        assert score("18", line % said, question) == 1
        assert score("19", line % said, question) == 0
    assert score("18", line % said, "How many are left?") == 0


UNITS = [  # rows of spellings of one unit
    ("m", "meter", "meters", "metre", "metres"),
    ("cm", "centimeters", "centimetres"),
    ("km", "kilometers", "kilometre"),
    ("kg", "kilograms"),
    ("g", "grams"),
    ("h", "hour", "hours", "hrs"),
    ("s", "second", "seconds", "sec"),
    ("min", "minutes"),
    ("dollars", "USD", "bucks"),
    ("euros", "EUR"),
    ("km/h", "kph", "kilometers per hour", "km per hour", "kmh"),
    ("m/s", "meters per second"),
    ("m^2", "square meters", "sq m", "m²", "meters squared"),
    ("cm^3", "cubic centimeters"),
    ("degrees", "deg"),
    ("inches", "in", "inch"),
    ("p.m.", "pm"),
    ("a.m.", "am"),
]
SPELLINGS = [(row, spelling) for row, spellings in enumerate(UNITS) for spelling in spellings]


@settings(max_examples=200, deadline=None, phases=PHASES)
@given(st.sampled_from(SPELLINGS), st.sampled_from(SPELLINGS), st.sampled_from(["5", "1.5", "\\frac{1}{2}", "2\\sqrt{3}"]))
@example((0, "m"), (1, "cm"), "2\\sqrt{3}")
def test_a_different_unit_is_wrong_and_another_spelling_is_right(one, other, number):
    gold, said = (f"{number}\\text{{ {spelling}}}" for _, spelling in (one, other))
    same = one[0] == other[0]
    assert units.differ(*(units.unit_of(spelling) for _, spelling in (one, other))) is not same
    assert score(gold, box(said)) == same
    assert score(gold, box(number)) == score(number, box(said)) == 1  # no unit on one side


@pytest.mark.parametrize("line", LINES)
def test_units_count_in_all_ways_to_commit(line):
    for gold, right, wrong in [
        ("5\\text{ cm}", "5 cm", "5 km"),
        ("\\$5", "5 dollars", "5 euros"),
        ("5\\text{ m}", "5 m", "5 kg"),
    ]:
        assert [score(gold, line % said) for said in (right, wrong)] == [1, 0]


@settings(max_examples=30, deadline=None, phases=PHASES)
@given(NOUNS, NOUNS)
def test_units_that_no_table_has_do_not_matter(one, other):
    assume(not any(units.unit_of(noun).parts for noun in (one, other)))
    assert score(f"6 {one}", box(f"6\\text{{ {other}}}")) == score(f"\\text{{6 {one}}}", box(f"6 {other}")) == 1


@pytest.mark.parametrize("line", [*LINES, "The answer is $%s$."])
def test_a_base_is_not_lost(line):
    for base in (2, 7, 16):
        gold = f"10_{base}"
        assert [score(gold, line % f"10_{said}") for said in (base, f"{{{base}}}", 9)] == [1, 1, 0]
        assert score(gold, line % f"10 in base {base}") == 1
        assert score(gold, line % "10") == 0


@pytest.mark.parametrize(
    "said", ["18 third graders", "18 times", "18 half-full cups", "18 apples and pears", "18 more eggs", "18 two-pound bags"]
)
@pytest.mark.parametrize("line", LINES)
def test_a_word_that_looks_like_another_number_is_a_noun_where_it_stands(said, line):
    assert [score(gold, line % said) for gold in ("18", "19")] == [1, 0]


def test_a_symbol_of_a_currency_stands_on_either_side():
    for said in ("\\$18", "18\\$", "\\$18.00", "18€", "US\\$18"):
        assert score("18", box(said)) == 1
