"""The live verdict of a run, and actions that `guard.rules` gives to the doctor's findings."""

import dataclasses
import json
import math

import pytest

from rljax import loop
from rljax.diagnosis import Rule, Severity, Sign
from rljax.diagnosis.live import LiveDoctor
from rljax.errors import GuardrailError, UserError
from rljax.flight.recording import Recording
from rljax.metrics.mean import Mean
from rljax.run import verdicts
from rljax.run.verdicts import Verdicts
from rljax.testing.harness import MemorySink, make_config, make_run

METRIC = "rollout/reward"


def _judge(history):
    """Finds the first step of more than six."""
    return Sign(Severity.BROKEN, int(history[METRIC].steps[6]), "six steps are enough") if len(history[METRIC]) > 6 else None


RULE = Rule("reward.enough", "It is enough.", _judge, needs=(METRIC,), causes=("it went on",), next="stop")
NOTE = dataclasses.replace(RULE, id="reward.note", judge=lambda history: Sign(Severity.NOTE, 1, "a note"))


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    monkeypatch.setattr("rljax.diagnosis.live.all_rules", lambda: [RULE, NOTE])


def _verdicts(tmp_path, **actions):
    return Verdicts(make_config({"guard.rules": actions}), tmp_path, 0)


def test_a_rule_has_its_action_once_until_its_finding_is_gone(tmp_path):
    judged = _verdicts(tmp_path, **{"reward": {"enough": "halve_lr", "note": "stop"}})
    due = []
    for step in range(1, 10):
        judged.write(step, {METRIC: Mean(step / 2, 1)})
        due.append(judged.breaches())
    (breach,) = due[6]
    assert not any(due[:6]) and not any(due[7:])
    assert (breach.guard, breach.metric, breach.value, breach.action) == ("rules.reward.enough", METRIC, 3.5, "halve_lr")
    assert (breach.since, breach.line, breach.remedy) == (7, "six steps are enough", "it went on; next: stop")
    judged.roll_back(3)
    for step in range(20, 25):
        judged.write(step, {METRIC: Mean(1.0, 1)})
        assert bool(judged.breaches()) == (step == 23)  # the seventh, beside steps 1 to 3


def test_a_finding_is_news_once_until_it_is_gone(tmp_path):
    """A note never is."""
    judged, news = _verdicts(tmp_path), []
    for step in range(1, 10):
        judged.write(step, {METRIC: Mean(step / 2, 1)})
        judged._doctor.judge()  # which it does by itself as far as time allows
        news.append([finding.rule for finding in judged.news()])
    assert news == [[]] * 6 + [["reward.enough"], [], []]
    judged.roll_back(3)
    assert judged.news() == []
    judged._doctor.judge()
    assert judged.news() == []  # of steps 1 to 3


def test_the_line_stays_while_only_figures_change(tmp_path, monkeypatch):
    counting = dataclasses.replace(RULE, judge=lambda h: Sign(Severity.BROKEN, 1, f"{len(h[METRIC])} steps"))
    monkeypatch.setattr("rljax.diagnosis.live.all_rules", lambda: [counting])
    monkeypatch.setattr(verdicts, "LiveDoctor", lambda config, before: LiveDoctor(config, before=before, share=1e9))
    judged, lines, figures = Verdicts(make_config({}), tmp_path, 0), [], []
    for step in range(1, 9):
        judged.write(step, {METRIC: Mean(0.5, 1)})
        lines.append(judged.line)
        figures.append(judged._doctor.verdict)
    assert len(set(figures)) == 8 and set(lines) == {figures[0]}


def test_a_run_that_ends_is_judged_by_all_its_steps(tmp_path):
    """Judging is rare in a short run, and "no RL steps" is not said of one that has yet to begin."""
    judged = Verdicts(make_config({}), tmp_path, 0)
    judged.write(0, {"eval-rollout/reward": Mean(0.5, 1)})
    assert judged.line == ""
    judged._doctor._due = math.inf
    for step in range(1, 8):
        judged.write(step, {METRIC: Mean(0.5, 1)})
    judged.conclude()
    assert "six steps are enough" in judged.line


def test_a_step_at_which_a_rule_spoke_is_kept_by_the_flight_recorder(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "LiveDoctor", lambda config, before: LiveDoctor(config, before=before, share=1e9))
    saver = {"saver.freq_steps": 4, "saver.keep_last": 1, "saver.background": False}  # else 4 may not be whole at step 7
    loop.train(make_run(tmp_path, {"total_train_epochs": 8, "flight.steps": 4} | saver))
    recording = Recording(tmp_path)
    assert [(kept.step, kept.why, kept.base) for kept in recording.kept()] == [(7, "reward.enough: six steps are enough", 4)]
    assert recording.steps() == [5, 6, 7, 21, 22, 23, 24] and 4 in recording.checkpoints()


def test_a_rule_that_does_not_exist_is_named_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"guard.rules.reward.enuf: no such rule \(did you mean reward.enough"):
        _verdicts(tmp_path, **{"reward": {"enuf": "warn"}})


def test_a_run_that_goes_on_is_judged_with_the_steps_before(tmp_path):
    rows = [{"step": step, METRIC: 0.5} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = Verdicts(make_config({"guard.rules": {"reward": {"enough": "warn"}}}), tmp_path, 5)
    for step in (6, 7):
        judged.write(step, {METRIC: Mean(1.0, 1)})
        assert bool(judged.breaches()) == (step == 7)


@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_the_verdict_is_in_the_status_and_a_rule_acts_on_a_run(tmp_path, action):
    overrides = {"guard.rules": {"reward": {"enough": action}}, "guard.max_rollbacks": 1, "saver.freq_steps": 1}
    sink = MemorySink()
    with pytest.raises(GuardrailError, match=r"guard.rules.reward.enough: six steps are enough \(it went on; next: stop\)"):
        loop.train(make_run(tmp_path, overrides, n_prompts=40, sink=lambda first_step: sink))
    steps = [7] if action == "stop" else [7, 10]  # back to step 5: the second step after the rollback is the seventh
    assert [event.step for event in sink.events] == steps and sink.events[0].action == action
    assert sink.statuses[0].verdict == "" and sink.statuses[-1].verdict


def test_a_run_judges_its_own_samples_and_what_its_guardrails_did(tmp_path, monkeypatch):
    """A rule sees at a step all that was written up to it, and nothing that was undone."""
    seen = []

    def judge(history):
        seen.append(([sample["step"] for sample in history.samples], [event["step"] for event in history.guard]))
        return _judge(history)

    monkeypatch.setattr("rljax.diagnosis.live.all_rules", lambda: [dataclasses.replace(RULE, judge=judge)])
    overrides = {"guard.rules": {"reward": {"enough": "rollback"}}, "guard.max_rollbacks": 1, "saver.freq_steps": 1}

    class WithSamples(MemorySink):
        def sample(self, step, *sample):
            with (tmp_path / "samples.jsonl").open("a") as file:
                file.write(json.dumps({"step": step}) + "\n")

    with pytest.raises(GuardrailError):
        loop.train(make_run(tmp_path, overrides, n_prompts=40, sink=lambda first_step: WithSamples()))
    samples, guard = seen[-1]
    assert guard == [7] and set(samples) == {1, 2, 3, 4, 5, 9, 10}  # 6 and 7 were undone, 8 was the rollback
    assert all(samples for samples, _ in seen)


def test_no_verdict_where_none_is_wanted(tmp_path):
    judged = Verdicts(make_config({"stats_logger.verdict": False}), tmp_path, 0)
    judged.write(1, {METRIC: Mean(1.0, 1)})
    assert judged.line == "" and not judged.breaches()
