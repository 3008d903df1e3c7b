"""The live doctor says what the doctor says, and takes no more of a run's time than its share."""

import itertools

import numpy as np
import pytest

from rljax.diagnosis import diagnose
from rljax.diagnosis.live import CAPACITY, SAMPLES, LiveDoctor
from rljax.diagnosis.thresholds import AUDITED
from rljax.errors import UserError
from tests.unit.diagnosis import made


def rows(columns):
    """Yields (step, scalars) of columns, without what a step has not."""
    for at in range(len(next(iter(columns.values())))):
        yield at + 1, {name: float(values[at]) for name, values in columns.items() if np.isfinite(values[at])}


def drifting(steps: int = made.STEPS):
    columns = made.healthy(steps=steps)
    return columns | {"ppo_actor/update/approx_kl": np.where(np.arange(steps) >= 30, 0.5, 0.003)}


@pytest.mark.parametrize("steps", [1, 12, 33, made.STEPS])
def test_a_judgment_is_that_of_the_history_so_far(steps):
    live, columns = LiveDoctor(made.config()), drifting()
    for step, scalars in rows(columns):
        if step <= steps:
            live.write(step, scalars)
    whole = made.history({name: values[:steps] for name, values in columns.items()}, context=(), samples=(), source="")
    assert live.judge() == diagnose(whole)


def test_arrays_grow_with_the_run():
    live, columns = LiveDoctor(made.config(), share=1e-9), made.healthy(steps=2 * CAPACITY + 3)
    for step, scalars in rows(columns):
        live.write(step, scalars)
    history = live.history()
    assert all(np.array_equal(history.series[name], values, equal_nan=True) for name, values in columns.items())


def test_several_writes_of_a_step_merge_and_steps_never_go_back():
    live = LiveDoctor(None)
    live.write(1, {"rollout/reward": 0.5})
    live.write(1, {"eval-rollout/reward": 0.4, "ppo_actor/update/loss": float("nan")})
    history = live.history()
    assert history.steps.tolist() == [1] and history.evaluations.values.tolist() == [0.4]
    assert history.not_finite["ppo_actor/update/loss"].tolist() == [1]
    with pytest.raises(ValueError, match="step 0"):
        live.write(0, {})


def test_judging_takes_no_more_than_its_share():
    """A clock on which a judgment takes a second, and a step of the run three."""
    now, judged = [0.0], [0]

    class Timed(LiveDoctor):
        def judge(self):
            now[0] += 1.0
            judged[0] += 1
            return super().judge()

    live = Timed(made.config(), share=0.1, clock=lambda: now[0])
    for step in range(1, 101):
        live.write(step, {"rollout/reward": 0.5})
        now[0] += 3.0
    assert judged[0] <= 0.1 * now[0] + 1
    assert judged[0] >= 0.05 * now[0]


def test_a_changed_verdict_is_returned_once():
    live, said = LiveDoctor(made.config(), share=1e9), []
    for step, scalars in rows(drifting()):
        if (diagnosis := live.write(step, scalars)) is not None:
            said.append((step, diagnosis.first_break))
    broken = [(step, first) for step, first in said if first is not None]
    assert broken and broken[0][1].rule == "policy.kl" and 31 <= broken[0][0] <= 40
    assert live.verdict == diagnose(live.history()).verdict()


def test_a_verdict_is_not_said_again_for_other_figures_or_counts():
    live = LiveDoctor(made.config(), share=1e9)
    said = [found for step, scalars in rows(drifting()) if (found := live.write(step, scalars)) is not None]
    words = [(found.standing, found.first and found.first.rule) for found in said]
    assert all(earlier != later for earlier, later in itertools.pairwise(words))


def test_a_run_that_goes_on_is_judged_with_its_past():
    columns = drifting()
    past = made.history({name: values[:40] for name, values in columns.items()})
    live = LiveDoctor(made.config(), before=past)
    for step, scalars in rows(columns):
        if step > 40:
            live.write(step, scalars)
    assert live.judge() == diagnose(made.history(columns, samples=past.samples))


def test_guard_events_and_samples_are_judged_as_they_come():
    columns, lines = made.healthy(), made.samples(completion=lambda step, random: "I'm sorry." if step > 40 else "12")
    guard = [{"step": 20, "action": "rollback", "restored": 15, "guard": "x", "metric": "m", "value": 1.0, "bound": None}]
    live = LiveDoctor(made.config(), share=1e-9)
    for step, scalars in rows(columns):
        live.write(step, scalars)
        for line in [line for line in lines if line["step"] == step]:
            live.sample(line)
        for event in [event for event in guard if event["step"] == step]:
            live.event(event)
    whole = diagnose(made.history(columns, samples=lines, guard=guard, context=(), source=""))
    assert live.judge().findings == whole.findings
    assert {"reward.template", "policy.guardrails"} <= {finding.rule for finding in whole.findings}


def test_of_many_samples_the_first_and_the_last_are_kept_and_a_share_of_the_others():
    live, lines = LiveDoctor(made.config()), [{"step": step} for step in range(7 * SAMPLES)]
    for line in lines:
        live.sample(line)
    kept = list(live.history().samples)
    assert SAMPLES / 4 < len(kept) <= SAMPLES
    assert kept[:AUDITED] == lines[:AUDITED] and kept[-AUDITED:] == lines[-AUDITED:]
    assert [line["step"] for line in kept] == sorted({line["step"] for line in kept})
    assert max(np.diff([line["step"] for line in kept])) < len(lines) / 20


def test_guardrails_ask_for_single_rules():
    live = LiveDoctor(made.config(), share=1e-9)
    for step, scalars in rows(drifting()):
        live.write(step, scalars)
    (finding,) = live.judge_only(["policy.kl", "numbers.not_finite"])
    assert finding.rule == "policy.kl"
    with pytest.raises(UserError, match=r"policy\.kl"):
        live.judge_only(["policy.kk"])
