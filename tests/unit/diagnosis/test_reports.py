"""Text, audits, checklists, differences, several seeds and the private set, as made from diagnoses."""

import dataclasses
import json
import statistics

import numpy as np
import pytest
from scipy import stats

from rljax.diagnosis import RULES, History, Link, diagnose
from rljax.diagnosis.summaries import audit, checklist, compare, private, render, seeds
from rljax.diagnosis.summaries.seeds import Interval
from rljax.errors import UserError
from rljax.evaluation.protocol import Protocol
from rljax.evaluation.results import Answers, Policy, Result, Sample
from tests.unit.diagnosis import made

LINKS_DURING = (  # of the items during training, behind that of evaluations
    *(Link.ENVIRONMENT, Link.REWARD, Link.POLICY, Link.CRITIC),
    *(Link.EXPLORATION, Link.FRESHNESS, Link.NUMBERS, Link.RESOURCES),
)


def broken():
    late = np.arange(made.STEPS) >= 30
    return made.history(made.healthy() | {"ppo_actor/update/clip_ratio": np.where(late, 0.7, 0.02)})


# Text


def headline(diagnosis):
    return render.text(diagnosis).splitlines()[0]


def test_the_verdict_is_the_first_line_and_every_finding_is_in_the_text():
    diagnosis = diagnose(broken())
    text = render.text(diagnosis)
    assert headline(diagnosis) == str(diagnosis.headlines[0]) and "policy" in headline(diagnosis)
    assert headline(diagnosis).startswith("BROKEN") and "step 31" in headline(diagnosis)
    flat = " ".join(text.split())
    assert all(" ".join(f.evidence[0].split()) in flat for f in diagnosis.findings)
    assert all(cause in flat for cause in diagnosis.first.causes) and diagnosis.first.next in flat


def test_a_healthy_run_says_so_and_names_what_was_not_judged():
    columns = {name: v for name, v in made.healthy().items() if name != "rollout/duplicate_prompts"}
    text = render.text(diagnose(made.history(columns)))
    assert text.startswith("HEALTHY") and "environment.duplicate_prompts" in text


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (lambda name: not name.startswith("rollout/reward"), "no RL steps"),
        (lambda name: name == "rollout/reward/avg", "policy"),
        (lambda name: False, "no RL steps"),
    ],
)
def test_a_run_without_the_metrics_of_reward_and_policy_is_not_judged(kept, why):
    columns = {name: values for name, values in made.healthy().items() if kept(name)}
    history = made.history(columns) if columns else History(np.zeros(0, np.int64), {})
    diagnosis = diagnose(history)
    assert headline(diagnosis).startswith("NOT JUDGED: ") and why in headline(diagnosis)
    assert not diagnosis.is_bad and "HEALTHY" not in render.text(diagnosis) and " 0 RL steps" not in render.text(diagnosis)


def test_a_supervised_run_has_no_link_ticked():
    columns = {name: v for name, v in made.healthy().items() if not name.startswith("rollout/reward")}
    history = made.history(columns)
    during = [f for f in checklist.fill(history, diagnose(history)) if f.phase is checklist.Phase.DURING][1:]
    assert {f.done for f in during} == {None} and {f.why for f in during} == {"no RL steps"}


@pytest.mark.parametrize("steps", [1, 4, 12, 25, 60])
def test_a_link_is_ticked_once_all_its_rules_have_the_steps_that_they_need(steps):
    """However the run ended: what nobody could look at is open, and the item says what it waits for."""
    failed = {"state": "failed", "error": "out of memory"}
    history = made.history({name: v[:steps] for name, v in made.healthy().items()}, status=failed)
    items = {f.text: f for f in checklist.fill(history, diagnose(history)) if f.phase is checklist.Phase.DURING}
    waiting = {
        rule.link
        for rule in RULES
        if rule.is_about(history) and not rule.symptom and all(history[name] for name in rule.needs)
        if any(len(history[name]) < rule.least for name in rule.needs)
    }
    links = dict(zip(items, [None, *LINKS_DURING], strict=True))
    for text, link in links.items():
        assert items[text].done is (None if link in waiting else True), text
        assert link not in waiting or " steps of " in items[text].why


def test_an_item_that_no_rule_is_about_is_open():
    history = made.history(config=made.config(actor__recompute_logprob=False, actor__use_decoupled_loss=False))
    items = {f.text: f for f in checklist.fill(history, diagnose(history))}
    assert items["Sampler and learner give the same log-probs"].done is None


def test_a_failed_run_is_never_healthy():
    history = made.history(status={"state": "failed", "error": "guard.collapse: rollout/reward\nis 0"})
    diagnosis = diagnose(history)
    assert headline(diagnosis) == "FAILED: guard.collapse: rollout/reward is 0" and diagnosis.is_bad
    (ended,) = [f for f in checklist.fill(history, diagnosis) if f.text == "The run came to its end"]
    assert ended.done is False and "guard.collapse" in ended.why


# The audit


def hacked():
    def completion(step, random):
        return "I'm sorry." if step > made.STEPS // 2 else str(random.integers(10, 99))

    lines = made.samples(completion=completion)
    order = np.random.default_rng(0).permutation(len(lines)) / (5 * len(lines))  # so that no two rewards are equal
    paid = [line | {"reward": float("sorry" in line["completion"]) + order[i]} for i, line in enumerate(lines)]
    return made.history(samples=paid)


def test_an_audit_lays_out_the_extremes_of_the_later_half(tmp_path):
    history = hacked()
    found = audit.audit(history, count=5)
    later = history.samples[len(history.samples) // 2 :]
    assert [s["reward"] for s in found.highest] == sorted((s["reward"] for s in later), reverse=True)[:5]
    assert [s["reward"] for s in found.lowest] == sorted(s["reward"] for s in later)[:5]
    assert len(found.picked) == 5 and all(sample in history.samples for sample in found.picked)
    assert found.changes["refusals (share of samples)"].late == 1 and found.changes["refusals (share of samples)"].early == 0
    assert any(finding.rule == "reward.refusal" for finding in found.findings)
    assert found.opening is not None and found.opening[1].startswith("I'")


def test_an_audit_is_written_for_people_and_scripts(tmp_path):
    hostile = [line | {"completion": "```\n| <script>alert(1)</script>"} for line in made.samples()]
    found = audit.audit(made.history(samples=hostile), score=lambda prompt, completion: len(prompt))
    audit.write(found, tmp_path / "out")
    tree = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert tree["highest"][0]["completion"] == hostile[0]["completion"] and tree["scored"] == len(hostile)
    page = (tmp_path / "out" / "audit.md").read_text()
    assert "````" in page  # a fence longer than those in the sample


def test_an_independent_score_that_agrees_has_no_disagreement():
    history = made.history(samples=made.samples(completion=lambda step, r: str(r.integers(10, 120))))
    by_reward = {(s["prompt"], s["completion"]): s["reward"] for s in history.samples}
    agrees = audit.audit(history, score=lambda p, c: 7 * by_reward[p, c] - 3)
    assert agrees.correlation in (None, pytest.approx(1.0)) and not agrees.disagreements


def test_samples_on_which_reward_and_score_differ_are_laid_out():
    history = hacked()
    found = audit.audit(history, score=lambda prompt, completion: float("sorry" not in completion), count=1000)
    assert found.correlation < 0
    highest = max(sample["reward"] for sample in history.samples)
    expected = [
        s for s in history.samples if abs(s["reward"] / highest - ("sorry" not in s["completion"])) > audit.DISAGREEMENT
    ]
    assert len(found.disagreements) == len(expected)
    assert all(a.apart >= b.apart for a, b in zip(found.disagreements, found.disagreements[1:], strict=False))


def test_an_audit_without_samples_or_with_a_failing_score_is_an_error():
    with pytest.raises(UserError, match=r"samples\.jsonl"):
        audit.audit(made.history(samples=()))
    with pytest.raises(UserError, match="--score: it raised ZeroDivisionError"):
        audit.audit(made.history(), score=lambda prompt, completion: 1 / 0)


# Checklists


def test_a_healthy_run_has_nothing_undone():
    history = made.history(status={"state": "finished"}, config=made.config(saver__freq_steps=10))
    filled = checklist.fill(history, diagnose(history))
    assert [item.text for item in filled if item.done is False] == []
    assert {item.phase for item in filled} == set(checklist.Phase)
    assert any(item.done is None for item in filled)  # a person has to read completions


def test_a_broken_link_undoes_its_item():
    history = broken()
    filled = checklist.fill(history, diagnose(history))
    undone = [item for item in filled if item.done is False and "trust region" in item.text]
    assert len(undone) == 1 and "policy.clip_ratio" in undone[0].why
    assert "[!] Updates stay in their trust region" in checklist.text(filled)


# Differences


def test_a_run_does_not_differ_from_itself():
    assert compare.differences(made.history(), made.history()) == []


def test_every_difference_is_found_under_its_name():
    other = dict(made.SESSION) | {"commit": "def", "packages": {"python": "3.12"}, "seed": 2}
    other["evaluation"] = dict(made.SESSION["evaluation"]) | {"temperature": 0.5}
    theirs = made.history(context=[other], config=made.config(actor__kl_ctl=0.5))
    found = {(d.about, d.key): (d.ours, d.theirs) for d in compare.differences(made.history(), theirs)}
    assert found == {
        ("config", "actor.kl_ctl"): (0.0, 0.5),
        ("code", "commit"): ("abc", "def"),
        ("packages", "packages.python"): ("3.11", "3.12"),
        ("seed", "seed"): (1, 2),
        ("evaluation", "evaluation.temperature"): (1.0, 0.5),
    }


def test_differences_turn_with_their_runs():
    ours, theirs = made.history(), made.history(context=(), config=made.config(seed=9))
    there, back = compare.differences(ours, theirs), compare.differences(theirs, ours)
    assert {(d.key, str(d.ours), str(d.theirs)) for d in there} == {(d.key, str(d.theirs), str(d.ours)) for d in back}


# Several seeds


@pytest.mark.parametrize("values", [[0.9, 0.95, 0.97], [1.0, 1.0], [0.1, 0.5, 0.4, 0.2, 0.9]])
def test_an_interval_is_that_of_students_t(values):
    ours = Interval.of([*values, float("nan")])
    assert ours.mean == pytest.approx(statistics.fmean(values))
    if len(set(values)) > 1:
        low, high = stats.t.interval(0.95, len(values) - 1, statistics.fmean(values), stats.sem(values))
        assert (ours.low, ours.high) == pytest.approx((low, high))


def test_one_run_has_no_interval():
    assert np.isnan(Interval.of([0.5]).low) and "one run" in str(Interval.of([0.5]))


def test_a_summary_has_every_run_and_what_differs_but_for_the_seed():
    runs = [made.history(made.healthy(s), config=made.config(seed=s), source=f"run{s}") for s in (1, 2)]
    runs.append(dataclasses.replace(broken(), config=made.config(seed=3, actor__kl_ctl=0.1), source="odd"))
    summary = seeds.summarize(runs)
    assert [o.seed for o in summary.outcomes] == [1, 2, 3]
    assert summary.held_out.values == tuple(run.evaluations.last for run in runs)
    assert [d.key for d in summary.differences] == ["actor.kl_ctl"]
    text = seeds.text(summary)
    assert "1 of 3 runs" in text and all(run.source in text for run in runs)
    json.dumps(summary.json(), allow_nan=False)


# The private set


def on_split(split: str, shift: float = 0.0):
    columns = made.healthy()
    columns["eval-rollout/reward/avg"] = columns["eval-rollout/reward/avg"] + shift
    session = dict(made.SESSION) | {"evaluation": dict(made.SESSION["evaluation"]) | {"split": split, "data": {"data": split}}}
    config = made.config.__wrapped__(valid_dataset__split=split)
    return made.history(columns, config=config, context=[session], source=split)


def result(tmp_path, split: str, rewards, step=None, **protocol):
    """Writes the result of an evaluation, as experiments.evaluate does. Returns its file."""
    measured = dict(made.SESSION["evaluation"]) | {"min_new_tokens": 0, "stop": (), "stop_token_ids": (), "success": 1.0}
    measured |= {"workflow": "rlvr", "workflow_args": {}, "system_prompt": "", "template": "t"}
    measured |= {"split": split, "data": {"data": split}} | protocol
    prompts = [Answers(f"0/{i}", [Sample(r, {}, "stop", 3) for r in several], {}) for i, several in enumerate(rewards)]
    policy = Policy("checkpoint", "runs/a", step, "d")
    return Result(policy, "", Protocol(**measured), 1, [1], prompts, has_answers=False).save(tmp_path)


def test_a_private_set_that_agrees_is_no_overfit():
    report = private.report(on_split("test"), private.score_of_run(on_split("private")))
    assert report.gap == 0 and not report.is_overfitted and report.splits == ("test", "private") and report.same_protocol


def test_a_gap_beyond_chance_is_an_overfit():
    report = private.report(on_split("test"), private.score_of_run(on_split("private", -0.2)))
    assert report.gap == pytest.approx(0.2) and report.is_overfitted
    assert report.error == pytest.approx(0.5 * np.sqrt(2 / made.EVALUATED))


def test_a_result_of_an_evaluation_is_a_private_score_of_its_checkpoint(tmp_path):
    """A prompt gives one value, whatever its samples; validation is that of the checkpoint's step."""
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [], [1.0, 0.0]]
    means = [0.5, 1.0, 0.0, 0.5]
    score = private.read(result(tmp_path, "private_test", rewards, step=43))
    assert score.reward == pytest.approx(np.mean(means))
    assert score.error == pytest.approx(statistics.stdev(means) / 2)
    run = on_split("test")
    report = private.report(run, score)
    assert report.validation == run.evaluations.until(43).last != run.evaluations.last
    assert report.splits == ("test", "private_test") and report.same_protocol
    other = private.read(result(tmp_path, "private_test", rewards, temperature=0.2))
    assert not private.report(run, other).same_protocol


def test_a_private_set_must_be_another_split(tmp_path):
    with pytest.raises(UserError, match=r"valid_dataset\.split"):
        private.report(on_split("test"), private.score_of_run(on_split("test")))
    with pytest.raises(UserError, match=r"\.json was evaluated on the same data as test"):
        private.report(on_split("test"), private.read(result(tmp_path, "test", [[1.0], [0.0]])))
    without = made.history({n: v for n, v in made.healthy().items() if not n.startswith("eval")}, source="none")
    with pytest.raises(UserError, match="none has no eval-rollout/reward"):
        private.report(on_split("test"), private.score_of_run(without))


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("{", "not JSON"), ('{"prompts": 3}', "no 'policy'"), ("[]", "not a JSON object")],
)
def test_a_file_that_is_no_result_is_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    with pytest.raises(UserError, match=rf"--private: .*{message}"):
        private.read(tmp_path / "r.json")
