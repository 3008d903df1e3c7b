"""Each rule speaks of its own fault, planted in a healthy run's metrics, and of no healthy run."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from rljax.data import open_prompts
from rljax.diagnosis import RULES, History, Link, Rule, Severity, diagnose, names
from rljax.diagnosis.rules.reward import tail_of
from rljax.testing.harness import make_config
from rljax.tools.toolbox import CallOutcome
from tests.unit.diagnosis import made
from tests.unit.diagnosis.faulty import (
    CASES,
    LATE,
    NOISE,
    TIME,
    N,
    acted,
    changed,
    constant,
    falling,
    hacked,
    memorized,
    protocol,
    rolled_back,
    scaled_evaluations,
    with_reward,
)


def test_every_rule_has_a_case():
    assert sorted(CASES) == sorted(rule.id for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_speaks_of_its_fault(rule):
    make, severity, first, last = CASES[rule.id]
    (finding,) = diagnose(make(), [rule]).findings
    assert (finding.rule, finding.link, finding.severity) == (rule.id, rule.link, severity)
    assert first <= finding.step <= last
    assert finding.evidence and all(line and "nan" not in line for line in finding.evidence)
    assert not rule.needs or any(digit in finding.evidence[0] for digit in "0123456789")  # figures, not words alone


@pytest.mark.parametrize("rule", [rule for rule in RULES if CASES[rule.id][1] > Severity.NOTE], ids=lambda rule: rule.id)
def test_the_link_of_a_fault_is_named_first(rule):
    diagnosis = diagnose(CASES[rule.id][0]())
    assert diagnosis.first is not None and diagnosis.first.link is rule.link, diagnosis.verdict()


@pytest.mark.parametrize("seed", range(8))
def test_a_healthy_run_has_notes_at_most(seed):
    diagnosis = diagnose(made.history(made.healthy(seed), samples=made.samples(seed)))
    assert diagnosis.first is None, diagnosis.verdict()
    assert not diagnosis.unjudged


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_without_its_metrics_is_unjudged_or_silent(rule):
    nothing = History(np.arange(1, 81), {})
    diagnosis = diagnose(nothing, [rule])
    assert rule.id in diagnosis.unjudged or all(f.severity is Severity.NOTE for f in diagnosis.findings)
    assert all(need in diagnosis.unjudged[rule.id] for need in rule.needs)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_rule_judges_the_first_steps_of_a_run(rule, steps):
    """A live run has few points, and some metrics fewer than others: no rule may raise."""
    columns = {name: values[:steps] for name, values in made.healthy().items()}
    diagnosis = diagnose(made.history(columns), [rule])
    assert all(finding.severity is Severity.NOTE for finding in diagnosis.findings)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_bears_gaps_in_its_metrics(rule):
    random = np.random.default_rng(0)
    columns = {name: np.where(random.random(N) < 0.3, np.nan, values) for name, values in made.healthy().items()}
    assert all(finding.severity < Severity.BROKEN for finding in diagnose(made.history(columns), [rule]).findings)


def test_a_single_noisy_step_moves_no_rule_but_those_about_single_steps():
    single = {"policy.kl", "numbers.outlier_rewards", "numbers.not_finite", "environment.foreign_tokens", "freshness.lag_bound"}
    rules = [rule for rule in RULES if rule.id not in single]
    for name, values in made.healthy().items():
        if name.startswith("eval"):
            continue
        spiked = values.copy()
        spiked[44] = 5 * np.nanmax(np.abs(values)) + 1
        diagnosis = diagnose(made.history(made.healthy() | {name: spiked}), rules)
        assert diagnosis.first is None, (name, diagnosis.verdict())


def test_steps_that_a_rollback_undid_are_judged_by_no_rule_but_that_of_guardrails():
    """Undone steps change no finding: they are judged as if they had never been."""
    history = rolled_back(3)
    kept = np.isin(TIME, list(history.undone), invert=True)
    clean = dataclasses.replace(
        made.history({name: values[kept] for name, values in history.series.items()}),
        steps=TIME[kept],
        samples=[line for line in history.samples if line["step"] not in history.undone],
    )
    others = [rule for rule in RULES if rule.id != "policy.guardrails"]
    assert diagnose(history, others).findings == diagnose(clean, others).findings
    assert "policy.kl" in {finding.rule for finding in diagnose(dataclasses.replace(history, guard=()), others).findings}


@pytest.mark.parametrize(
    ("events", "severity"),
    [
        ([acted("rollback", 20, 15)], Severity.NOTE),
        ([acted("rollback", 20, 15), acted("rollback", 30, 25)], Severity.WARNING),
        ([acted("rollback", 20, 15), acted("rollback", 60, 12)], Severity.BROKEN),  # 48 of 80 steps
        ([acted("halve_lr", 9)], Severity.NOTE),
        ([acted("halve_lr", 9), acted("halve_lr", 12)], Severity.WARNING),
        ([acted("skip", step) for step in range(1, 9)], Severity.NOTE),
        ([acted("skip", step) for step in range(1, 10)], Severity.WARNING),
        ([acted("skip", step) for step in range(1, 42) for _ in range(2)], Severity.BROKEN),
        ([acted("warn", step) for step in range(1, 81)], None),
        ([acted("stop_epoch", step) for step in range(1, 81)], None),  # the target KL of PPO
    ],
)
def test_guardrails_that_act_again_are_a_strain_and_most_of_a_run_a_break(events, severity):
    (rule,) = [rule for rule in RULES if rule.id == "policy.guardrails"]
    found = diagnose(made.history(guard=events), [rule]).findings
    assert [finding.severity for finding in found] == ([] if severity is None else [severity])
    assert all("max_approx_kl" in f.evidence[0] and "approx_kl 12.5, bound 10" in f.evidence[0] for f in found)


def test_an_update_that_moves_no_token_at_its_full_rate_is_none():
    """Below the full rate, or without advantages, there is nothing to move."""
    still = {f"ppo_actor__update__importance_weight__{end}": 1 + sign * 1e-6 for end, sign in (("min", -1), ("max", 1))}
    lr = made.config().actor.optimizer.lr

    def found(rate, advantage=2.6, **more):
        history = changed(ppo_actor__update__lr=rate, ppo_actor__advantage__max=advantage, **(still | more))
        return [f for f in diagnose(history).findings if f.rule == "policy.no_update"]

    (finding,) = found(lr)
    assert finding.severity is Severity.BROKEN and "actor.optimizer.eps" in finding.causes[0]
    assert not found(lr / 100) and not found(lr, advantage=0.0)
    assert not found(lr, ppo_actor__update__importance_weight__max=1.1)


def test_held_out_prompts_of_another_task_are_named_beside_the_gap():
    """A gap with no difference that is known is a warning, and a difference without a gap a note."""
    none = np.where(np.isfinite(made.healthy()["eval-rollout/reward/avg"]), 0.0, np.nan)
    gap = {"eval-rollout__reward__avg": none, "eval-reward__exact__avg": none}
    other = made.config.__wrapped__(valid_dataset__task={"digits": 3}, train_dataset__task={"digits": 2})
    first = diagnose(changed(other, **gap)).first
    assert (first.rule, first.severity, first.step) == ("evaluation.protocol", Severity.BROKEN, 1)
    assert "valid_dataset.task.digits is 3 and train_dataset.task.digits 2" in first.evidence[1]
    assert diagnose(changed(other)).first is None
    more = made.config.__wrapped__(valid_dataset__task={"n": 100, "seed": 3}, train_dataset__task={"misled": 0.7})
    assert not [f for f in diagnose(changed(more)).findings if f.rule == "evaluation.protocol"]


def test_held_out_prompts_of_another_kind_that_improve_with_training_are_no_break():
    """Games that training joins midway, and evaluations play from the start."""
    joined = made.config.__wrapped__(train_dataset__task={"earlier": True})
    higher = {name: np.minimum(made.healthy()[name] + 0.15, 1) for name in ("eval-rollout/reward/avg", "eval-reward/exact/avg")}
    (finding,) = diagnose(made.history(made.healthy() | higher, config=joined), only("evaluation.protocol")).findings
    assert finding.severity is Severity.NOTE and "task.earlier" in finding.evidence[1]
    asked = made.config(valid_dataset__system_prompt="be brief")
    lower = {name: made.healthy()[name] / 2 for name in higher}
    (finding,) = diagnose(made.history(made.healthy() | lower, config=asked), only("evaluation.protocol")).findings
    assert finding.severity is Severity.BROKEN  # nobody means to ask otherwise


@pytest.mark.parametrize("name", sorted(names.COUNTS))
def test_what_a_workflow_counts_is_no_score(name):
    """Evaluations may have more turns, or calls of tools, than training."""
    rewards = {} if name == "turns" else {"reward__style__avg": 0.5}  # of another reward, only the components compare
    evaluated = np.where(np.isfinite(scaled_evaluations(1.0)), 3.0, np.nan)
    history = changed(**{f"reward__{name}__avg": 1.0, f"eval-reward__{name}__avg": evaluated}, **rewards)
    assert not diagnose(history, only("evaluation.protocol")).findings


@pytest.mark.parametrize(
    ("name", "is_fault"), [("turns", False), ("squared_error", False), ("late_penalty", False), ("exact", True)]
)
def test_a_reward_may_move_against_a_count_or_a_cost(name, is_fault):
    """A wrong answer is followed by one more turn, so that turns are 2 - reward."""
    against = {f"reward__{name}__avg": 2 - made.healthy()["rollout/reward/avg"]}
    rules = {finding.rule for finding in diagnose(changed(**against)).of(Severity.BROKEN)}
    assert ("reward.sign" in rules) is is_fault and "reward.components_apart" not in rules


def test_the_counts_of_workflows_are_known():
    assert {outcome.value for outcome in CallOutcome} - {CallOutcome.OK.value} < names.COUNTS


def until(history: History, step: int) -> History:
    """The run as it was at a step."""
    return history.between(1, step)


@pytest.mark.parametrize("large", [0.05, 0.4])
def test_large_steps_at_the_start_are_a_strain_until_they_have_lasted_and_a_note_once_they_are_over(large):
    ended = changed(ppo_actor__update__approx_kl=np.where((TIME > 2) & (TIME <= 20), large, 0.003))
    lasting = changed(ppo_actor__update__approx_kl=np.where(TIME > 2, large, 0.003))
    costly = with_reward(
        np.where(TIME < 15, 0.5, 0.05) + 0.01 * NOISE, ppo_actor__update__approx_kl=np.where(TIME > 2, large, 0)
    )

    def severity(history):
        (finding,) = diagnose(history, only("policy.kl")).findings
        assert finding.step == 3
        return finding.severity

    assert [severity(until(ended, step)) for step in (20, 35, 80)] == [Severity.WARNING, Severity.NOTE, Severity.NOTE]
    assert [severity(until(lasting, step)) for step in (20, 80)] == [Severity.WARNING, Severity.BROKEN]
    assert severity(until(costly, 25)) is Severity.BROKEN


@pytest.mark.parametrize(
    ("name", "metric", "low", "high"),
    [
        ("policy.clip_ratio", "ppo_actor__update__clip_ratio", 0.02, 0.7),
        ("policy.importance_weight", "ppo_actor__update__importance_weight__avg", 1.0, 1.5),
        ("policy.capped", "ppo_actor__update__behave_cap_ratio", 0.0, 0.7),
        ("environment.truncation", "ppo_actor__no_eos_ratio", 0.0, 0.7),
        ("environment.failures", "rollout__failed__reward_error", 0.0, 200.0),
    ],
)
def test_what_a_run_has_behind_it_is_a_note_unless_reward_is_lost(name, metric, low, high):
    """Trouble that passes, as of a server that was away for a while, or a policy that took a large step and found back."""
    passed = np.where((TIME > 20) & (TIME <= 40), high, low)

    def severity(history):
        (finding,) = diagnose(history, only(name)).findings
        assert finding.step == 21
        return finding.severity

    assert severity(changed(**{metric: passed})) is Severity.NOTE
    assert severity(until(changed(**{metric: passed}), 40)) is Severity.BROKEN
    assert severity(with_reward(falling(from_step=21), **{metric: passed})) is Severity.BROKEN
    if high < 1:
        strained = np.where(passed == high, high, np.where(TIME > 40, 0.2, low))  # it goes on, at a lower level
        assert name == "policy.clip_ratio" or severity(changed(**{metric: strained})) is Severity.WARNING


def test_a_policy_that_became_sure_is_judged_by_what_it_gained():
    """The best reward there is may be less than the range of rewards."""
    sure = np.where(LATE, 0.01, 0.3)
    ceiling = np.minimum(0.25 + TIME / 60, 0.6) + 0.01 * NOISE

    def found(history):
        return [finding.severity for finding in diagnose(history, only("exploration.entropy_collapse")).findings]

    gained = with_reward(ceiling, ppo_actor__update__entropy=sure)
    assert found(gained) == [Severity.NOTE]
    unmeasured = {name: values for name, values in gained.series.items() if not name.startswith("eval")}
    assert found(dataclasses.replace(gained, series=unmeasured)) == [Severity.WARNING]
    assert found(hacked(rollout__reward__avg=ceiling, ppo_actor__update__entropy=sure)) == [Severity.BROKEN]


def test_held_out_reward_that_rises_in_its_last_evaluation_is_not_flat():
    """Three evaluations, of which the second was unlucky: the mean of the last two is the first."""
    evaluated = np.full(N, np.nan)
    evaluated[[0, 19, 39]] = 0.3, 0.1, 0.5
    history = changed(**{"eval-rollout__reward__avg": evaluated})
    assert not diagnose(until(history, 59), only("reward.hacking")).findings
    evaluated[39] = 0.3
    assert diagnose(until(changed(**{"eval-rollout__reward__avg": evaluated}), 59), only("reward.hacking")).findings


def test_supervised_steps_are_no_measure_of_the_time_of_others():
    """Five steps of reinforcement after 75 of a warm-up, of which the first three compile."""
    supervised = TIME <= 75
    columns = {name: np.where(supervised, np.nan, values) for name, values in made.healthy().items()}
    columns["timeperf/wall"] = np.where(supervised, 0.1, np.where(TIME <= 78, 9.0, 1.0))
    assert not diagnose(made.history(columns), only("resources.throughput_drop")).findings


def test_held_out_prompts_are_told_from_those_of_training_by_what_is_in_the_files(tmp_path):
    """Whatever the files are called."""
    lines = [f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(20)]
    for name, content in (("train", lines), ("copy", lines), ("other", lines[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(content))

    def identity(name):
        dataset = make_config({"train_dataset.path": str(tmp_path / f"{name}.jsonl"), "train_dataset.type": "prompt_answer"})
        return dict(open_prompts(dataset.train_dataset, seed=1).identity)

    def found(held_out):
        session = dict(made.SESSION) | {"data": identity("train"), "evaluation": protocol(data=identity(held_out))}
        return [f.severity for f in diagnose(made.history(context=[session])).findings if f.rule == "evaluation.same_data"]

    assert found("copy") == [Severity.BROKEN] and found("other") == []


@pytest.mark.parametrize(
    ("workflow", "speaks"), [("rlvr", True), ("multi_turn", True), ("environment", False), ("agent", False)]
)
def test_one_observation_begins_many_games(workflow, speaks):
    history = changed(made.config(rollout__workflow=workflow), rollout__duplicate_prompts=0.9)
    assert bool(diagnose(history, only("environment.duplicate_prompts")).findings) is speaks


def test_one_token_that_is_the_whole_answer_is_not_empty():
    history = changed(ppo_actor__seq_len__avg=1.0, ppo_actor__no_eos_ratio=1.0)
    assert not [f for f in diagnose(history).findings if f.rule == "reward.empty"]


def test_what_was_one_token_from_the_first_is_the_task():
    history = changed(ppo_actor__seq_len__avg=1.0)
    assert not diagnose(history, only("reward.empty")).findings


@pytest.mark.parametrize(
    ("level", "estimator", "severity"), [("group", "grpo", Severity.NOTE), ("none", "grpo", Severity.BROKEN)]
)
def test_returns_of_hundreds_are_a_note_where_their_spread_is_divided_out(level, estimator, severity):
    """Returns of a game that pays for each of 500 steps."""
    config = made.config(actor__reward_norm__std_level=level, actor__adv_estimator=estimator)
    (finding,) = diagnose(changed(config, rollout__reward__max=500.0), only("reward.scale")).findings
    assert finding.severity is severity


def test_a_reward_that_is_only_watched_is_no_fault():
    """Rewards of distillation may all be 0, or move as they like."""
    watched = made.config(actor__reward_scaling=0.0)
    history = changed(watched, **constant(0.0))
    assert not [
        finding for finding in diagnose(history).findings if finding.link is Link.REWARD and finding.severity > Severity.NOTE
    ]
    assert diagnose(changed(**constant(0.0))).first.rule == "reward.all_zero"


@pytest.mark.parametrize(("values", "has_tail"), [((0.8, 0.9, 1.0), False), ((0.05, 0.05, 1.0), True), ((1.0,), False)])
def test_rare_successes_that_are_alike_are_no_long_tail(values, has_tail):
    """97 of 100 fail; the others earn what a discount leaves of 1, or one earns twenty times as much."""
    counts, edges = np.histogram(np.repeat([0.0, *values], [97 * len(values), *(len(values) * [1])]), bins=40, range=(0.0, 1.0))
    assert (tail_of(edges, counts) is not None) is has_tail


@pytest.mark.parametrize(("entropy", "speaks"), [(0.3, True), (0.01, False)])
def test_completions_that_are_all_but_certain_may_be_the_same(entropy, speaks):
    history = changed(rollout__distinct_completions__avg=0.125, ppo_actor__update__entropy=entropy)
    assert bool(diagnose(history, only("exploration.identical_completions")).findings) is speaks


def test_rules_say_what_they_mean_and_what_to_do():
    for rule in RULES:
        assert rule.meaning.endswith(".") and rule.causes and rule.next, rule.id
        assert not any(cause.endswith(".") for cause in rule.causes), rule.id


@pytest.mark.parametrize(("lag0", "cap", "first"), [(-0.3, 5.0, "disagree"), (-1e-6, 5.0, "stale"), (-1e-6, None, "cap")])
def test_causes_of_decoupled_weights_are_told_apart(lag0, cap, first):
    away = {"ppo_actor__update__behave_imp_weight__avg": 1.5, "ppo_actor__behave_log_ratio_lag0": lag0}
    history = changed(made.config(actor__behav_imp_weight_cap=cap), **away)
    (finding,) = diagnose(history, [rule for rule in RULES if rule.id == "policy.behave_imp_weight"]).findings
    assert first in finding.causes[0]


def only(id: str) -> list[Rule]:
    return [rule for rule in RULES if rule.id == id]


def test_a_gap_that_opens_late_is_no_matter_of_the_protocol():
    """Training and held-out reward part in the last third: that is hacking, or overfit."""
    gap = np.where(TIME > 55, 0.5, 0.0)
    late = {name: made.healthy()[name] - gap for name in ("eval-rollout/reward/avg", "eval-reward/exact/avg")}
    always = {name: made.healthy()[name] * 0.3 for name in late}
    assert not diagnose(made.history(made.healthy() | late), only("evaluation.protocol")).findings
    (finding,) = diagnose(made.history(made.healthy() | always), only("evaluation.protocol")).findings
    assert finding.severity is Severity.WARNING  # no setting that explains it


@pytest.mark.parametrize("best", [20, 40, 60])
def test_hacking_begins_where_held_out_reward_was_best(best):
    held_out = np.where(best >= TIME, 0.25 + 0.4 * TIME / best, 0.65 - 0.02 * (TIME - best))
    evaluated = np.isfinite(scaled_evaluations(1.0))
    history = changed(**{"eval-rollout__reward__avg": np.where(evaluated, held_out, np.nan)})
    (finding,) = diagnose(history, only("reward.hacking")).findings
    assert finding.step == best


@pytest.mark.parametrize(("minibatches", "kl"), [(2, 0.003), (1, 0.0)])
def test_a_distance_that_lag_and_updates_explain_is_not_stale(minibatches, kl):
    """Twice the lag makes four times the distance; the same distance at no lag is stale."""
    explained = {2: 0.003 * 2 * (2 * 2) ** 2, 1: 0.1}[minibatches]
    given = {"ppo_actor__update__approx_kl": kl, "config": made.config(actor__ppo_n_minibatches=minibatches)}
    steady = changed(ppo_actor__behave_log_ratio__avg=-explained * (1 + 0.1 * NOISE), **given)
    assert not diagnose(steady, only("freshness.stale_weights")).findings
    grows = changed(ppo_actor__behave_log_ratio__avg=-explained * TIME, **given)
    assert diagnose(grows, only("freshness.stale_weights")).findings


def test_completions_that_changed_are_no_memory():
    """After many passes over the prompts too, completions that grew for reward are hacking."""
    grown = dataclasses.replace(hacked(ppo_actor__seq_len__avg=3.6 + 0.05 * TIME), samples=memorized().samples)
    rules = only("reward.hacking") + only("evaluation.overfit")
    assert [finding.rule for finding in diagnose(memorized(), rules).findings] == ["evaluation.overfit"]
    assert [finding.rule for finding in diagnose(grown, rules).findings] == ["reward.hacking"]


def only_means(history: History, *more: str) -> History:
    """The history as another trainer logs it: of rewards only the mean, and what `more` names."""
    lost = {"rollout/reward/min", "rollout/reward/max", "rollout/equal_reward_groups", "rollout/group_reward_std/avg"}
    return dataclasses.replace(history, series={n: v for n, v in history.series.items() if n not in lost - set(more)})


def first_rule(history: History) -> str:
    first = diagnose(history).first
    return "" if first is None else first.rule


@pytest.mark.parametrize("spread", [(), ("rollout/equal_reward_groups",), ("rollout/group_reward_std/avg",)])
@pytest.mark.parametrize(("value", "rule"), [(0.0, "reward.all_zero"), (1.0, "reward.all_one")])
def test_constant_rewards_are_seen_in_a_log_without_their_ends(value, rule, spread):
    history = changed(**constant(value), rollout__group_reward_std__avg=0.0)
    assert first_rule(only_means(history, *spread)) == first_rule(history) == rule


def test_a_constant_mean_of_rewards_with_spread_is_not_a_constant_reward():
    history = only_means(changed(**constant(0.0) | {"rollout__equal_reward_groups": 0.2}), "rollout/equal_reward_groups")
    assert not any(finding.rule == "reward.all_zero" for finding in diagnose(history).findings)


def test_rewards_of_the_prompt_alone_are_seen_in_a_log_without_their_ends():
    history = only_means(changed(rollout__equal_reward_groups=1.0), "rollout/equal_reward_groups")
    assert first_rule(history) == "reward.constant_by_prompt"


def steady(from_step: int, seed: int, **columns: Any) -> History:
    """A run without evaluations whose reward stands at 0.5 and falls to 0.05 in 20 steps."""
    noise = 0.02 * np.random.default_rng(seed).standard_normal(N)
    reward = 0.5 - 0.45 * np.clip((TIME - from_step) / 20, 0, 1) + noise
    history = changed(rollout__reward__avg=reward, reward__exact__avg=reward, **columns)
    return dataclasses.replace(history, series={n: v for n, v in history.series.items() if not n.startswith("eval")})


def test_a_reward_that_dies_at_once_is_broken_though_evaluations_go_on():
    dead = TIME >= 50
    ends = ("avg", "min", "max")
    kept = {f"rollout__reward__{end}": np.where(dead, 0.0, changed().series[f"rollout/reward/{end}"]) for end in ends}
    history = changed(**kept, rollout__equal_reward_groups=np.where(dead, 1.0, 0.2))
    first = diagnose(history).first
    assert first is not None and (first.rule, first.step) == ("reward.falls", int(history.steps[dead][0]))
    assert "every reward is 0" in str(first.evidence) and "has failed" in first.causes[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("from_step", [35, 45, 55])
def test_a_reward_that_stood_still_and_fell_late_has_its_onset_there(from_step, seed):
    found = {finding.rule: finding for finding in diagnose(steady(from_step, seed)).findings}
    assert "policy.reversed" not in found
    assert from_step - 8 <= found["reward.falls"].step <= from_step + 8


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_that_falls_all_the_while_is_reversed(seed):
    noise = 0.02 * np.random.default_rng(seed).standard_normal(N)
    assert first_rule(with_reward(0.6 - 0.5 * TIME / N + noise)) == "policy.reversed"


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("ppo_actor__update__reference_kl", 0.05 + 0.3 * np.maximum(TIME - 45, 0), "policy.reference_kl"),
        ("ppo_actor__update__entropy", 0.3 + 0.1 * np.maximum(TIME - 43, 0), "exploration.entropy_rises"),
    ],
)
def test_what_goes_far_as_the_reward_falls_is_broken_and_comes_first(name, values, rule):
    """Without a fall it is a warning: nobody measured what it is good for."""
    assert diagnose(steady(45, 0, **{name: values})).first_break.rule == rule
    alone = diagnose(steady(N, 0, **{name: values}))
    assert alone.first_break is None and rule in {finding.rule for finding in alone.of(Severity.WARNING)}


def test_ten_nats_from_the_reference_are_broken_by_themselves():
    history = steady(N, 0, ppo_actor__update__reference_kl=np.where(LATE, 40.0, 0.05))
    assert diagnose(history).first_break.rule == "policy.reference_kl"


@pytest.mark.parametrize(("late", "speaks"), [(0.3, True), (0.31, True), (0.2, False), (0.6, False)])
def test_still_entropy_says_so_in_words_that_are_true(late, speaks):
    history = changed(ppo_actor__update__entropy=np.where(LATE, late, 0.3))
    found = [f.evidence[0] for f in diagnose(history).findings if f.rule == "exploration.entropy_never_falls"]
    assert bool(found) is speaks
    assert not found or ("still 0.3" in found[0]) is (late == 0.3)


def test_a_negative_scaling_is_seen_before_the_first_step():
    empty = History(np.zeros(0, np.int64), {}, config=made.config(actor__reward_scaling=-1.0))
    first = diagnose(empty).first_break
    assert (first.rule, first.next) == ("reward.negative_scaling", "unset actor.reward_scaling")
