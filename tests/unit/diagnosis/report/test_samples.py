"""Samples: which are shown, and the color of each token."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljax.diagnosis.report.samples import (
    LONGEST,
    MOST_TOKENS,
    SAMPLES_PER_STEP,
    SHADES,
    STEPS_SHOWN,
    is_sample,
    laid_out,
    pick,
)


def sample(step=1, reward=1.0, *, pieces=("a", "b", "c"), advantages=((0.5, 3),), versions=((4, 3),), **fields):
    tokens = {"pieces": list(pieces), "advantages": advantages, "versions": versions}
    line = {"step": step, "uid": "0/1", "prompt": "p", "completion": "".join(pieces), "reward": reward, **tokens, **fields}
    return json.loads(json.dumps(line))


def shade(token) -> int:
    (style,) = (style for style in token.style.split() if style.startswith("a"))
    return int(style[1:])


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_shades_are_in_the_order_of_advantages_and_of_their_sign(advantages):
    pieces = [str(i) for i in range(len(advantages))]
    largest = max(map(abs, advantages))
    laid = laid_out(sample(pieces=pieces, advantages=[(a, 1) for a in advantages], versions=[(0, len(pieces))]), largest)
    shades = [shade(token) for token in laid.tokens]
    ordered = [s for _, s in sorted(zip(advantages, shades, strict=True))]
    assert ordered == sorted(ordered) and all(s * a >= 0 for s, a in zip(shades, advantages, strict=True))
    assert not largest or max(map(abs, shades)) == SHADES


def test_tokens_keep_their_text_their_advantage_and_their_version():
    laid = laid_out(sample(advantages=[(0.5, 1), (None, 1), (-0.5, 1)], versions=[(4, 1), (-1, 1), (5, 1)]), 0.5)
    assert [token.text for token in laid.tokens] == ["a", "b", "c"]
    assert [token.style for token in laid.tokens] == ["a4 v1", "not-sampled", "a-4 v0"]
    assert laid.tokens[0].title == "advantage +0.5, version 4" and laid.versions == (4, 5)


def test_a_run_that_did_not_record_tokens_shows_the_completion_as_a_whole():
    old = {"step": 3, "prompt": "1+2=", "completion": "3<eos>", "reward": 1.0, "versions": [[7, 2]], "components": {}}
    laid = laid_out(old, 0.0)
    assert [token.text for token in laid.tokens] == ["3<eos>"] and not laid.advantages and laid.versions == (7,)


def test_a_long_completion_is_cut_and_says_so():
    long = laid_out(sample(pieces=["x"] * (MOST_TOKENS + 7)), 1.0)
    assert len(long.tokens) == MOST_TOKENS and long.left_out == 7


@pytest.mark.parametrize("marked", [1, 57, 100])
def test_the_marked_step_is_among_those_shown_and_so_are_both_ends(marked):
    shown = [s.step for s in pick([sample(step) for step in range(1, 101)], marked)]
    assert len(shown) <= STEPS_SHOWN and {1, marked, 100} <= set(shown) and shown == sorted(shown)


def test_of_a_step_the_lowest_and_the_highest_reward_come_first():
    rewards = [3.0, 1.0, 9.0, 5.0, 7.0, 2.0]
    shown = [s.reward for s in pick([sample(reward=reward) for reward in rewards], None)]
    assert shown == [1.0, 9.0, 2.0, 7.0] and len(shown) == SAMPLES_PER_STEP


def test_a_sample_with_no_finite_reward_is_shown():
    (shown,) = pick([sample(reward=None)], None)
    assert shown.reward is None


@pytest.mark.parametrize(
    "damage",
    [
        *({"reward": value} for value in ("", "7", True, float("inf"), 10**400, [1.0])),
        *({"versions": value} for value in ("", [[0]], [["", 3]], [[0.5, 3]], [[0, -1]], [[0, 2**70]], {"0": 3}, None)),
        *({"advantages": value} for value in ([[float("inf"), 3]], [["a", 3]], [[0.5, None]], [[0.5, LONGEST + 1]], [0.5])),
        *({"pieces": value} for value in ("abc", [1, 2, 3], {"a": 1})),
        *({"components": value} for value in ([], {"right": "yes"}, {"right": float("inf")})),
    ],
    ids=lambda damage: str(damage)[:50],
)
def test_a_line_with_a_field_of_another_kind_is_left_out(damage):
    good = sample(uid="0/2")
    assert is_sample(good) and not is_sample(good | damage)
    assert [each.uid for each in pick([sample() | damage, good], None)] == ["0/2"]
