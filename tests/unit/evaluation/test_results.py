"""Results, their comparison and the record of uses: what is estimated, kept, refused and warned of."""

import dataclasses
import itertools
import json

import pytest

from rljax.errors import UserError
from rljax.evaluation import comparison, results, uses
from rljax.evaluation.protocol import Protocol, differences
from rljax.evaluation.results import Answers, Policy, Result, Sample, ks_of

PROTOCOL = Protocol(
    split="dev", prompts=3, n_samples=2, temperature=1.0, top_p=1.0, top_k=0, greedy=False, max_new_tokens=8,
    min_new_tokens=0, stop=["\n"], stop_token_ids=[], success=1.0, reward="exact", workflow="rlvr", workflow_args={},
    system_prompt="", template="t", data={"data": "d"},
)  # fmt: skip


def result(*rows, policy="a", protocol=PROTOCOL, failed=None, answers=True):
    """Makes a result of the rewards of each prompt."""
    prompts = [
        Answers(f"0/{i}", [Sample(r, {"exact": r}, "stop", 3, str(r)) for r in row], dict(failed or {}) if i == 0 else {})
        for i, row in enumerate(rows)
    ]
    return Result(Policy("model", policy, digest=policy), "", protocol, 1, ks_of(protocol.n_samples), prompts, answers)


def test_a_result_comes_back_from_its_file(tmp_path):
    written = result([1.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    read = results.load(written.save(tmp_path / "made" / "here"))
    assert read.json() == written.json()
    assert read.estimates == written.estimates and read.protocol.digest == PROTOCOL.digest


def test_estimates_leave_out_prompts_with_too_few_samples():
    found = result([1.0], [0.0, 0.0], [1.0, 1.0], failed={"reward_timeout": 1})
    assert {name: estimate.prompts for name, estimate in found.estimates.items()} == {
        "pass@1": 3, "pass@2": 2, "maj@2": 2, "avg@2": 3,
    }  # fmt: skip
    assert found.failed == {"reward_timeout": 1}
    assert found.estimates["pass@1"].value == pytest.approx(2 / 3)
    assert found.pass_at_1_if_failures_fail == pytest.approx((0.5 + 0 + 1) / 3)


def test_what_passes_is_what_has_the_reward_of_success():
    half = dataclasses.replace(PROTOCOL, success=0.5)
    rows = [0.5, 0.4], [1.0, 0.0], [0.0, 0.0]
    assert result(*rows, protocol=half).estimates["pass@1"].value == pytest.approx(1 / 3)
    assert result(*rows).estimates["pass@1"].value == pytest.approx(1 / 6)


def test_there_is_no_vote_without_answers():
    assert not any(name.startswith("maj") for name in result([1.0, 0.0], answers=False).estimates)


def test_every_setting_of_the_protocol_is_in_its_digest():
    others = {
        "split": "test", "prompts": 4, "n_samples": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "greedy": True,
        "max_new_tokens": 9, "min_new_tokens": 1, "stop": [], "stop_token_ids": [3], "success": 0.5, "reward": "math",
        "workflow": "multi_turn", "workflow_args": {"max_turns": 2}, "system_prompt": "s", "template": "u",
        "data": {"data": "e"},
    }  # fmt: skip
    assert set(others) == {field.name for field in dataclasses.fields(Protocol)}
    changed = [dataclasses.replace(PROTOCOL, **{key: value}) for key, value in others.items()]
    assert len({protocol.digest for protocol in [PROTOCOL, *changed]}) == len(others) + 1
    for key, protocol in zip(others, changed, strict=True):
        (line,) = differences(PROTOCOL.json(), protocol.json())
        assert line.startswith(f"{key}: ")
    assert dataclasses.replace(PROTOCOL, stop=("\n",)).digest == PROTOCOL.digest  # as it comes back from JSON


def test_a_comparison_is_paired():
    """Prompts of very different difficulty, of which each gains 0.1: unpaired, that would be lost in their spread."""
    difficulty = [0.0, 0.2, 0.4, 0.6, 0.8]
    first = result(*([d, d] for d in difficulty), policy="a")
    second = result(*([d + 0.1, d + 0.1 + 0.001 * i] for i, d in enumerate(difficulty)), policy="b")
    compared = comparison.compare(first, second)
    assert compared.reward.low > 0.05 and compared.verdict == "b is better"
    assert (compared.better, compared.worse, compared.equal) == (5, 0, 0)
    mirrored = comparison.compare(second, first)
    assert mirrored.reward.value == pytest.approx(-compared.reward.value) and mirrored.verdict == "b is better"
    assert comparison.compare(first, first).verdict.startswith("no difference")
    json.dumps(compared.json(), allow_nan=False)


def test_different_protocols_do_not_compare_unless_that_is_said():
    other = dataclasses.replace(PROTOCOL, temperature=0.6, template="u")
    first, second = result([1.0], [0.0]), result([1.0], [1.0], protocol=other)
    with pytest.raises(UserError, match=r"temperature: 1\.0, 0\.6; template: 't', 'u'"):
        comparison.compare(first, second)
    assert comparison.compare(first, second, despite=("temperature", "template")).better == 1
    with pytest.raises(UserError, match="at least 2"):
        comparison.compare(result([1.0]), result([1.0]))
    with pytest.raises(UserError, match=r"no such setting of a protocol: temprature \(did you mean temperature"):
        comparison.compare(first, second, despite=("temprature",))


def test_prompts_of_other_records_are_never_paired():
    """Places in the data name the prompts, and another selection of the same records has the same places."""
    for key, differs in (("data", True), ("kept", False)):
        other = dataclasses.replace(PROTOCOL, data={**PROTOCOL.data, key: "e"})
        first, second = result([1.0], [0.0]), result([1.0], [1.0], protocol=other)
        with pytest.raises(UserError, match="--despite: data: the records differ" if differs else "different protocols"):
            comparison.compare(first, second, despite=("data",) if differs else ())
    assert comparison.compare(first, second, despite=("data",)).better == 1


def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path):
    for content in ("{", "[]", '{"policy": {}}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(UserError) as caught:
            results.load(tmp_path / "x.json")
        assert "\n" not in str(caught.value) and "x.json" in str(caught.value)


def used(purpose="training", split="test", step=None, policy=""):
    return uses.use_of(purpose, "", dataclasses.replace(PROTOCOL, split=split), step=step, policy=policy)


@pytest.mark.parametrize(
    ("made", "split", "warns"),
    [
        ([used(step=1)], "test", False),
        ([used(step=1), used(step=1)], "test", False),  # the same policy again
        ([used(step=1), used(step=2)], "test", True),
        ([used("best", step=1)], "private_test", False),  # another split
        ([used("best", "private", 1)], "private", True),
        ([used("evaluate", policy="x"), used("evaluate", policy="y")], "test", True),
        ([used("evaluate", step=1, policy="x"), used("evaluate", step=1, policy="y")], "test", True),  # of two runs
        ([used(step=1), used("evaluate", step=1, policy="x"), used("evaluate", policy="x")], "test", False),
        ([used("best", "dev", step) for step in range(9)], "dev", False),  # it is there to choose by
        ([used("best", "smoke", 1)], "smoke", False),
    ],
)
def test_a_test_split_that_chose_is_warned_of(tmp_path, made, split, warns):
    for one in made:
        uses.record(tmp_path, [one])
    history = uses.history(uses.read(tmp_path), split, "d")
    assert bool(history.warning) == warns
    assert history.evaluations == sum(one.split == split for one in made)


def test_a_torn_line_of_the_record_is_left_out(tmp_path):
    uses.record(tmp_path, [used(step=1)])
    with (tmp_path / uses.FILE).open("a") as file:
        file.write('{"purpose": "tr')
    assert len(uses.read(tmp_path)) == 1 and uses.read(tmp_path / "nowhere") == []
    uses.record(tmp_path, [used(step=2)])
    assert [use.step for use in uses.read(tmp_path)] == [1, 2]


def test_ks_are_powers_up_to_the_number_of_samples():
    assert [ks_of(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]
    assert ks_of(8, (5,)) == (1, 5)
    for n, k in itertools.product(range(1, 20), range(1, 20)):
        assert ks_of(n, (k,)) == tuple(sorted({1, k}))
