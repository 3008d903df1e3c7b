"""A recorded step that is made again has the metrics of the run, to the bit, whatever it depends on."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from rljax.config.schema import Config
from rljax.errors import GuardrailError, UserError
from rljax.flight.comparison import compare
from rljax.flight.recording import Recording, spans
from rljax.testing.harness import IN_MEMORY, Repeat
from tests.unit.flight.recorded import ASYNC, replayer_of, train

NO_NORM = {"actor.reward_norm.mean_level": "none", "actor.reward_norm.std_level": "none"}
KINDS = {
    "synchronous": {},
    "asynchronous": ASYNC,
    "interpolated": ASYNC | {"actor.prox_logp_method": "loglinear"},
    "stale tokens masked": ASYNC | {"rollout.stale_policy": "mask", "rollout.max_head_offpolicyness": 1},
    "truncated completions masked": ASYNC | {"actor.mask_no_eos": True},
    "reference after a warm-up": ASYNC | {"actor.kl_ctl": 0.1, "warmup.steps": 3, "warmup.batch_size": 4},
    "critic": ASYNC | NO_NORM | {"actor.adv_estimator": "gae", "critic.ppo_n_minibatches": 3, "critic.optimizer.lr": 0.05},
    "supervised": {"actor.loss": "sft"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_made_again_has_the_metrics_of_the_run(tmp_path, kind):
    """Each of them by itself, from the checkpoint before it."""
    _, sink = train(tmp_path, KINDS[kind] | {"saver.freq_steps": 4, "total_train_epochs": 4})
    recording, learned = Recording(tmp_path), False
    able = recording.remakeable()
    assert len(able) >= 3  # from the last two checkpoints
    for step in able:
        replayer, record = replayer_of(tmp_path), recording.read(step)
        replayer.go_to(record.header.parent, record.config)
        again = compare(sink.steps[step], replayer.make(record).metrics, dtype="float32", steps=1)
        assert len(again.differences) > 3 and again.unrecorded == ()
        assert [d for d in again.differences if not d.equal] == []
        learned |= any(d.name.endswith("grad_norm") and d.recorded > 0 for d in again.differences)
    assert learned


class Souring(Repeat):
    """Its rewards are lower by 1 after 160 episodes."""

    episodes = 0

    async def episode(self, generator, prompt, params, seed):
        trajectory = await super().episode(generator, prompt, params, seed)
        self.episodes += 1
        return trajectory if self.episodes < 160 else dataclasses.replace(trajectory, reward=trajectory.reward - 1)


def test_steps_on_both_sides_of_a_rollback_have_the_metrics_of_the_run(tmp_path):
    """Also from a checkpoint before the rollback, when the one that it made is gone."""
    guards = {"guard.min_reward": -0.5, "guard.patience": 3, "guard.max_rollbacks": 1, "guard.action": "rollback"}
    saver = {"saver.freq_steps": 1, "saver.keep_last": 9}
    with pytest.raises(GuardrailError):
        train(tmp_path, ASYNC | guards | saver | {"total_train_epochs": 9}, workflow=Souring())
    recording = Recording(tmp_path)
    (back,) = (header for header in recording.headers().values() if header.version is None)
    assert 0 < back.parent < back.step - 1
    with pytest.raises(UserError, match=f"--step: {back.step} is a rollback to the learner after step {back.parent}"):
        recording.read(back.step)
    shutil.rmtree(tmp_path / "checkpoints" / str(back.step))
    shutil.rmtree(tmp_path / "checkpoints" / str(back.parent), ignore_errors=True)
    last, made = recording.read(recording.steps()[-1]), []
    assert last.header.step > back.step and last.header.lr_factor == 0.3
    replayer = replayer_of(tmp_path, on_made=made.append)
    replayer.go_to(last.header.parent, last.config)
    made.append(replayer.make(last))
    steps = [remade.step for remade in made]
    assert back.parent in steps and not set(steps) & set(range(back.parent + 1, back.step + 1))
    for remade in made:
        again = compare(recording.metrics(remade.step), remade.metrics, dtype="float32", steps=1)
        assert len(again.differences) > 30 and [d for d in again.differences if not d.equal] == []


def test_all_steps_made_again_lead_to_the_weights_of_the_run(tmp_path):
    run, _ = train(tmp_path, ASYNC | {"total_train_epochs": 4})
    replayer = replayer_of(tmp_path)
    last = Recording(tmp_path).read(12)
    shutil.rmtree(tmp_path / "checkpoints")  # from the initial model on
    replayer.go_to(12, last.config)
    assert replayer.distance == 12
    np.testing.assert_array_equal(replayer.learner.export(IN_MEMORY).params, run.engine.learner.export(IN_MEMORY).params)


def test_going_forward_uses_the_present_state_and_going_back_a_checkpoint(tmp_path):
    train(tmp_path, ASYNC | {"total_train_epochs": 4, "saver.freq_steps": 4, "saver.keep_last": 3})
    made = []
    replayer = replayer_of(tmp_path, on_made=lambda remade: made.append(remade.step))
    config = Recording(tmp_path).read(10).config

    def weights():
        return replayer.learner.export(IN_MEMORY).params

    replayer.go_to(6, config)
    at_six = weights()
    replayer.go_to(7, config)
    assert made == [5, 6, 7]
    replayer.go_to(6, config)
    assert made == [5, 6, 7, 5, 6]
    np.testing.assert_array_equal(weights(), at_six)
    replayer.go_to(8, config)
    assert made[5:] == [7, 8]


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    run, _ = train(tmp_path, ASYNC | {"total_train_epochs": 4, "saver.freq_steps": 4, "saver.keep_last": 3})
    newest = tmp_path / "checkpoints" / "12" / "learner" / "learner.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    replayer, record = replayer_of(tmp_path), Recording(tmp_path).read(12)
    replayer.go_to(12, record.config)
    assert replayer.distance == 4 and "an older checkpoint is tried" in caplog.text
    np.testing.assert_array_equal(replayer.learner.export(IN_MEMORY).params, run.engine.learner.export(IN_MEMORY).params)


def test_steps_on_both_sides_of_a_change_of_config_are_made_with_their_own(tmp_path):
    frequency = {"saver.freq_steps": 4, "saver.keep_last": 9}
    train(tmp_path, ASYNC | frequency | {"total_train_epochs": 2, "actor.optimizer.lr": 0.05})
    _, sink = train(tmp_path, ASYNC | frequency | {"total_train_epochs": 4, "actor.optimizer.lr": 0.01})
    assert sink.first_step == 6
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    replayer, record = replayer_of(tmp_path), Recording(tmp_path).read(7)
    replayer.go_to(6, record.config)  # from the checkpoint at 4, with the rate of then
    assert replayer.distance == 2
    remade = replayer.make(record)
    assert remade.metrics["ppo_actor/update/lr"] == 0.01
    assert all(d.equal for d in compare(sink.steps[7], remade.metrics, dtype="float32", steps=1).differences)


def test_a_step_that_can_not_be_made_again_is_one_line_with_those_that_can(tmp_path):
    train(tmp_path, ASYNC | {"saver.freq_steps": 4, "saver.keep_last": 2, "total_train_epochs": 4, "warmup.steps": 1})
    recording = Recording(tmp_path)
    assert recording.steps() == list(range(2, 14))  # a warm-up's are not recorded
    shutil.rmtree(tmp_path / "flight" / "6")
    config = recording.read(13).config
    with pytest.raises(UserError, match=r"no checkpoint up to step 7 has all batches .* \(steps that can be made again: 13\)"):
        replayer_of(tmp_path).go_to(7, config)
    with pytest.raises(UserError, match=r"--step: 6 is not recorded in .*\(steps that can be made again: 13\)"):
        recording.read(6)
    with pytest.raises(UserError, match="has no flight/"):
        Recording(tmp_path / "model")


def test_keys_of_a_later_release_have_their_defaults_and_one_that_is_gone_is_named(tmp_path):
    """A recording outlives the release that made it."""
    train(tmp_path, ASYNC | {"saver.freq_steps": 4, "saver.keep_last": 2, "total_train_epochs": 2})
    recording = Recording(tmp_path)
    step = recording.newest()
    header = recording.header(step)
    before, path = recording.config(header), recording.folder / header.config
    tree = json.loads(path.read_text())
    del tree["actor"]["eps_clip"], tree["flight"]
    path.write_text(json.dumps(tree))
    defaults = Config()
    actor = dataclasses.replace(before.actor, eps_clip=defaults.actor.eps_clip)
    assert recording.config(header) == dataclasses.replace(before, actor=actor, flight=defaults.flight)
    replayer_of(tmp_path).go_to(header.parent, recording.config(header))
    path.write_text(json.dumps(tree | {"gone": 1}))
    with pytest.raises(UserError, match=r"gone.*; use the release that recorded it"):
        recording.config(header)


def test_spans_are_read_back():
    for steps in ([], [3], [1, 2, 3], [1, 3, 4, 5, 9]):
        text = spans(steps)
        ends = [part.split("-") for part in text.split(", ")] if text else []
        assert [step for part in ends for step in range(int(part[0]), int(part[-1]) + 1)] == steps


def test_a_comparison_tells_equal_near_and_different():
    nan, inf = float("nan"), float("inf")
    recorded = {"a": 1.0, "b": nan, "c": 200.0, "sampler": 1.0}
    same = compare(recorded, {"a": 1.0, "b": nan, "c": 200.0}, dtype="float32", steps=1)
    assert same.holds and same.verdict == "equal: all 3 metrics to the bit"
    near = compare(recorded, {"a": 1.0, "c": 200.003, "new": 1.0}, dtype="float32", steps=2)  # 1.5e-5 of it
    assert near.holds and near.verdict.startswith("equal within 2e-05: 1 of 2") and near.unrecorded == ("new",)
    assert not compare(recorded, {"c": 200.003}, dtype="float32", steps=1).holds
    assert not compare(recorded, {"a": nan}, dtype="float32", steps=1).holds
    assert not compare(recorded, {"b": inf}, dtype="float32", steps=1).holds
    assert "BEYOND" in compare(recorded, {"a": 1.1}, dtype="float32", steps=1).table()
