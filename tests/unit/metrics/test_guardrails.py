"""A run that has gone wrong ends by itself, says why, and goes on from before it went wrong."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from rljax import loop
from rljax.config.schema import GuardConfig
from rljax.errors import GuardrailError
from rljax.metrics.guardrails import GUARDS, IDLE, Guardrails, update_bounds
from rljax.metrics.mean import Mean
from rljax.testing.harness import MemorySink, RememberingLearner, Repeat, make_config, make_run

NOTHING = dict.fromkeys((guard.key for guard in GUARDS), None)


class Rails(Guardrails):
    """Guardrails over steps that are counted here."""

    def __init__(self, **bounds):
        super().__init__(GuardConfig(**{"patience": 3, "finite": True} | NOTHING | bounds))
        self.step = 0

    def __call__(self, metrics):
        """Returns what is due after the next step, as text."""
        self.step += 1
        return [f"guard.{breach.guard}: {breach.line} ({breach.remedy})" for breach in self.check(self.step, metrics)]


def _guard(**bounds):
    return Rails(**bounds)


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.key for guard in GUARDS])
def test_each_bound_ends_a_run_after_so_many_steps_in_a_row_and_names_all_there_is_to_know(guard):
    rails, inside, outside = _guard(**{guard.key: 2.0}), (1.0 if guard.is_maximum else 3.0), (3.0 if guard.is_maximum else 1.0)
    on_it = {guard.metric: Mean(4.0, 2)}
    for values in ([outside, outside, inside], [outside, outside]):
        for value in values:
            assert not rails({guard.metric: Mean(2 * value, 2)})
            assert bool(rails.suspect) == (value == outside)
    assert not rails({})  # a step that does not tell decides nothing
    (line,) = rails({guard.metric: Mean(2 * outside, 2)})
    assert line.startswith(f"guard.{guard.key}: {guard.metric} is {outside:g}, ")
    assert "2, for 3 steps in a row" in line and guard.remedy in line and "\n" not in line
    rails = _guard(**{guard.key: 2.0})
    for _ in range(9):
        assert not rails(on_it)  # the bound itself is within it
    assert not rails.suspect
    rails = _guard()
    for _ in range(9):
        assert not rails({guard.metric: Mean(2e9 if guard.is_maximum else -2e9, 2)})  # no bound


@pytest.mark.parametrize("guard", [g for g in GUARDS if math.isfinite(g.fatal_factor)], ids=lambda guard: guard.key)
def test_one_step_far_out_of_a_bound_is_enough(guard):
    bound = 2.0
    edge = bound * guard.fatal_factor if guard.is_maximum else bound / guard.fatal_factor
    rails = _guard(**{guard.key: bound})
    assert not rails({guard.metric: Mean(edge, 1)})  # out, but not far
    assert rails.suspect
    (line,) = _guard(**{guard.key: bound})({guard.metric: Mean(edge * 1.1 if guard.is_maximum else edge / 1.1, 1)})
    assert re.match(f"guard.{guard.key}: .* far (above|below) 2, for one step ", line)


def test_steps_that_teach_nothing_are_told_once_and_again_when_they_come_again():
    rails = _guard()

    def step(*advantages):
        return rails.hint({"ppo_actor/advantage": Mean.of(np.array(advantages)), "rollout/reward": Mean(1.0, 4)})

    for _ in range(2):
        told = [step(0.0, 0.0) for _ in range(2 * IDLE)]
        assert [bool(line) for line in told] == [i == IDLE - 1 for i in range(2 * IDLE)]
        assert "rollout/reward 0.25" in told[IDLE - 1] and "\n" not in told[IDLE - 1]
        assert not step(1.0, -1.0)
    assert not any(step(0.0, 0.0) or step(0.5, -0.5) for _ in range(2 * IDLE))
    assert not rails.hint({})


class Indifferent(Repeat):
    """A workflow whose reward does not depend on the completion."""

    async def episode(self, *args):
        return dataclasses.replace(await super().episode(*args), reward=0.25)


def test_a_run_whose_reward_is_constant_says_so(tmp_path, caplog):
    loop.train(make_run(tmp_path, workflow=Indifferent(), n_prompts=40))
    said = [record.getMessage() for record in caplog.records]
    assert sum("every reward was 0.25 in the last 5 steps, and every advantage was 0, so that" in line for line in said) == 1
    assert any(line.startswith("the run ends with steps from which nothing was learned") for line in said)


def test_a_constant_reward_is_told_where_advantages_are_not_0():
    rails = _guard()
    constant = {"ppo_actor/advantage": Mean.of([1.0, -1.0]), "rollout/reward": Mean.of([0.0, 0.0])}
    told = [rails.hint(constant) for _ in range(2 * IDLE)]
    assert [bool(line) for line in told] == [step == IDLE - 1 for step in range(2 * IDLE)]
    assert told[IDLE - 1].startswith("every reward was 0 in the last 5 steps, and no completion was told from another")


def test_a_value_that_is_no_number_is_out_of_every_bound():
    rails = _guard(max_approx_kl=1.0, patience=1)
    (line,) = rails({"ppo_actor/update/approx_kl": Mean(math.nan, 1)})
    assert "approx_kl is nan, above 1, for one step" in line


@pytest.mark.parametrize(
    "metrics",
    [
        {"ppo_actor/update/loss": Mean(math.nan, 1)},
        {"ppo_actor/update/grad_norm": Mean(math.inf, 1)},
        {"warmup/loss": Mean(math.nan, 1)},
        {"critic/loss": Mean(-math.inf, 3)},
        {"ppo_actor/update/skipped": Mean(1.0, 4), "ppo_actor/update/loss": Mean(0.0, 0)},
    ],
    ids=lambda metrics: next(iter(metrics)),
)
def test_losses_and_gradients_are_numbers(metrics):
    rails = _guard()
    for _ in range(2):
        assert not rails(metrics)
    assert re.search(r"not finite|is nan|is -?inf", rails.check_end(2).line)
    (line,) = rails(metrics)
    assert line.startswith("guard.finite: ") and "3 steps in a row" in line
    rails = _guard(finite=False)
    for _ in range(9):
        assert not rails(metrics)
    assert rails.check_end(9) is None


def test_a_gradient_of_exactly_0_is_bad_where_advantages_are_not():
    def metrics(norm, low, high):
        return {"ppo_actor/update/grad_norm": Mean(norm, 2), "ppo_actor/advantage": Mean(0.0, 8, low, high)}

    rails = _guard(patience=2)
    for harmless in (metrics(0.0, 0.0, 0.0), metrics(1e-30, -1.0, 1.0), {"ppo_actor/update/grad_norm": Mean(0.0, 1)}):
        assert not rails(harmless) and not rails.suspect
    assert not rails(metrics(0.0, -1.0, 1.0)) and rails.suspect
    (line,) = rails(metrics(0.0, -1.0, 1.0))
    assert line.startswith("guard.gradient: ppo_actor/update/grad_norm is exactly 0, with advantages from -1 to 1, for 2 steps")


def _unlearned(*rewards):
    """Returns metrics of a step with these rewards, all advantages 0."""
    return {"rollout/reward": Mean.of(rewards), "ppo_actor/advantage": Mean(0.0, len(rewards), 0.0, 0.0)}


def _rewarded(count, of):
    return _unlearned(*[1.0] * count, *[0.0] * (of - count))


def test_a_reward_that_chance_takes_away_has_not_collapsed():
    rails = _guard()
    assert not rails(_rewarded(1, of=32))
    for _ in range(3000):
        assert not rails(_rewarded(0, of=32)) and not rails.suspect


@pytest.mark.parametrize(("best", "worst"), [(0.9, 0.0), (1.0, 0.0), (0.9, 0.3)])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (5.0, -2.0)])
def test_a_collapse_of_many_completions_is_told_at_once(best, worst, scale, shift):
    rails, n = _guard(), 256
    for share, told in [(best, False)] * 100 + [(worst, False), (worst, False), (worst, True)]:
        rewards = [1.0] * round(share * n) + [0.0] * (n - round(share * n))
        assert bool(rails(_unlearned(*(scale * reward + shift for reward in rewards)))) == told
        assert bool(rails.suspect) == (share == worst)


def test_completions_of_one_prompt_are_one_draw():
    def told(group_size):
        rails = Guardrails(GuardConfig(patience=1), group_size)
        return any(rails.check(step, _rewarded(8 if step == 1 else 0, of=32)) for step in range(1, 9))

    assert told(1) and not told(8)  # eight of 32 prompts, and one of four


def test_false_alarms_of_a_constant_policy_are_as_rare_as_they_are_meant_to_be():
    draw, alarms = np.random.default_rng(0), 0
    for _ in range(300):
        rails, rate = _guard(patience=1), draw.uniform(0.01, 0.3)
        alarms += any(rails(_rewarded(draw.binomial(16, rate), of=16)) for _ in range(100))
    assert not alarms


def test_actions_are_due_again_after_as_many_more_steps_and_the_most_severe_comes_first():
    actions = {"min_entropy": "warn", "max_approx_kl": "rollback", "max_grad_norm": "halve_lr"}
    rails = _guard(patience=2, min_entropy=1.0, max_approx_kl=1.0, max_grad_norm=1.0, actions=actions)
    bad = {f"ppo_actor/update/{name}": Mean(v, 1) for name, v in (("entropy", 0.5), ("approx_kl", 2.0), ("grad_norm", 2.0))}
    due = [[(breach.action, breach.since) for breach in rails.check(step, bad)] for step in range(7, 12)]
    assert due == [[], [("rollback", 7), ("halve_lr", 7), ("warn", 7)]] * 2 + [[]]
    rails.reset()
    assert not rails.suspect and not rails.check(12, bad)


def test_bounds_of_updates_are_left_to_the_updates():
    config = GuardConfig(**NOTHING | {"max_approx_kl": 1.0, "max_grad_norm": 2.0}, actions={"max_approx_kl": "skip"})
    (bound,) = update_bounds(config, "skip", "stop_epoch")
    assert (bound.guard.key, bound.bound, bound.action) == ("max_approx_kl", 1.0, "skip")
    name = "ppo_actor/update/approx_kl"
    assert [bound.broken(m) for m in ({}, {name: Mean(0.0, 0)}, {name: Mean(2.0, 2)}, {name: Mean(3.0, 2)})] == [
        *(False, False, False, True)
    ]
    assert bound.broken({name: Mean(math.nan, 1)})
    rails = Guardrails(config)
    assert not any(rails.check(step, {name: Mean(50.0, 1)}) for step in range(9)) and not rails.suspect
    assert not update_bounds(dataclasses.replace(config, enabled=False), "skip")


def test_guardrails_that_are_off_see_nothing():
    rails = _guard(enabled=False, max_approx_kl=1.0, patience=1)
    assert not rails({"ppo_actor/update/approx_kl": Mean(5e9, 1), "ppo_actor/update/loss": Mean(math.nan, 1)})
    assert not rails.suspect and rails.check_end(1) is None


class Breaks(RememberingLearner):
    """A learner whose loss and weights are NaN from the fifth update on."""

    def update(self, batch):
        metrics = super().update(batch)
        if self._adam["policy"].steps >= 5:
            self._table = np.full_like(self._table, np.nan)
            metrics["ppo_actor/update/loss"] = Mean(math.nan, 1)
        return metrics

    def score(self, batch):
        return np.zeros(batch.token_ids.shape, np.float32)


def _broken(workdir, overrides):
    run = make_run(workdir, {"saver.freq_steps": 1, "gconfig.max_new_tokens": 1} | overrides, n_prompts=40)
    run.engine.learner = Breaks(run.config, workdir / "model")
    return run


def test_a_run_that_breaks_keeps_what_it_was_and_goes_on_from_before_it_broke(tmp_path):
    with pytest.raises(GuardrailError) as info:
        loop.train(_broken(tmp_path, {}))
    line = str(info.value)
    assert line.startswith("guard.finite: ppo_actor/update/loss is nan, for 3 steps in a row (")
    assert line.endswith(f"the state is kept in {tmp_path}/checkpoints/7-failed, and the same command goes on from step 4")
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["3", "4", "7-failed"]  # none was made while the guardrail was counting
    book = json.loads((tmp_path / "checkpoints" / "7-failed" / "loop.json").read_text())["book"]
    assert book["version"] == 7

    sinks = []
    sound = make_run(tmp_path, {"gconfig.max_new_tokens": 1}, n_prompts=40, sink=lambda n: sinks.append(n) or MemorySink(n))
    assert loop.train(sound).step == 10 and sinks == [4]
    assert {uid: len(steps) for uid, steps in sound.engine.learner.trained.items()} == {f"0/{i}": 1 for i in range(40)}


def test_a_run_does_not_end_well_on_broken_weights(tmp_path):
    with pytest.raises(GuardrailError, match=r"guard\.finite: .*5-failed, and the same command goes on from step 4"):
        loop.train(_broken(tmp_path, {"total_train_steps": 5, "saver.export_final": True}))
    assert not (tmp_path / "export").exists()


def test_the_supervised_steps_are_guarded_too(tmp_path):
    class BreaksEarly(RememberingLearner):
        def update_supervised(self, batch):
            return super().update_supervised(batch) | {"ppo_actor/update/loss": Mean(math.nan, 1)}

    run = make_run(tmp_path, {"warmup.steps": 9, "warmup.batch_size": 4})
    run.engine.learner = BreaksEarly(run.config, tmp_path / "model")
    with pytest.raises(
        GuardrailError, match=r"guard\.finite: warmup/loss is nan, for 3 steps in a row .*the same command starts over"
    ):
        loop.train(run)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3-failed"]


def test_a_healthy_run_is_left_alone_by_the_defaults(tmp_path):
    config = make_config()
    assert config.guard.finite and config.guard.max_approx_kl and config.guard.max_behave_imp_weight
    overrides = {"rollout.max_head_offpolicyness": 3, "actor.ppo_n_minibatches": 2, "total_train_epochs": 3}
    assert loop.train(make_run(tmp_path, overrides, n_prompts=40)).step == 30
