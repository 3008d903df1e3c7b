"""The flight recorder keeps the right batches, no more than it may, and never ends a run."""

import dataclasses
import json

import numpy as np
import pytest

from rljax.engines.fake.learner import FakeLearner
from rljax.errors import GuardrailError, UserError
from rljax.flight import store
from rljax.flight.comparison import compare
from rljax.flight.recorder import Recorder
from rljax.flight.recording import Recording
from rljax.rollout import dump
from rljax.testing.harness import Repeat, make_config
from rljax.train_step import Scored
from rljax.types import Finish, Group, Trajectory
from tests.unit.flight.recorded import ASYNC, replayer_of, train


def batch(step, tokens=8):
    """One group whose tokens tell the step."""
    mask = np.arange(tokens) > 0
    ids = np.full(tokens, step, np.int32)
    one = Trajectory(ids, mask, np.zeros(tokens, np.float32), np.where(mask, step, -1), float(step), {}, Finish.STOP)
    return [Group(f"0/{step}", (one,))]


def record(recorder, steps, **options):
    for step in steps:
        recorder.record(step, step - 1, batch(step, **options), lr_factor=1.0)


def recorder_of(workdir, first_step=0, **limits):
    return Recorder(make_config({f"flight.{name}": value for name, value in limits.items()}), workdir, first_step=first_step)


def size_of(folder):
    return sum(file.stat().st_size for file in folder.glob("[0-9]*/*"))


def test_a_record_has_the_batch_and_its_scores_to_the_bit(tmp_path):
    recorder, groups = recorder_of(tmp_path), batch(1)
    trajectories = [t for group in groups for t in group.trajectories]
    random = np.random.default_rng(0)
    arrays = {name: [random.normal(size=8).astype(np.float32)] for name in ("advantage", "proximal", "returns")}
    recorder.record(1, 0, groups, lr_factor=0.5)
    recorder.scored(1, Scored(trajectories, **arrays, reference=None, teacher=None, values=None))
    recorder.close()
    found = Recording(tmp_path).read(1)
    assert found.groups[0].uid == "0/1"
    assert (found.header.version, found.header.parent, found.header.lr_factor) == (0, 0, 0.5)
    np.testing.assert_array_equal(found.groups[0].trajectories[0].token_ids, groups[0].trajectories[0].token_ids)
    assert set(found.scores) == {"advantage", "proximal_logp", "returns"}
    np.testing.assert_array_equal(found.scores["proximal_logp"][0], arrays["proximal"][0])
    assert found.config == make_config()


def test_a_reward_that_is_no_number_stays_none(tmp_path):
    one = batch(1)[0].trajectories[0]
    for reward in (float("nan"), float("inf"), 1.0):
        odd = Trajectory(one.token_ids, one.loss_mask, one.behavior_logp, one.versions, reward, {"exact": reward}, one.finish)
        dump.save(tmp_path / str(reward), [Group("0/1", (odd,))])
        (read,) = dump.load(tmp_path / str(reward))[0].trajectories
        assert np.isfinite(read.reward) == np.isfinite(reward) == np.isfinite(read.components["exact"])


def test_the_last_steps_are_kept(tmp_path):
    recorder = recorder_of(tmp_path, steps=3)
    record(recorder, range(1, 8))
    recorder.close()
    assert Recording(tmp_path).steps() == [5, 6, 7]


def test_all_records_together_stay_within_their_size_and_the_newest_is_among_them(tmp_path):
    limit = 0.02
    recorder = recorder_of(tmp_path, max_mb=limit)
    record(recorder, range(1, 30), tokens=200)
    recorder.close()
    steps = Recording(tmp_path).steps()
    assert steps == list(range(30 - len(steps), 30)) and 1 < len(steps) < 10
    assert size_of(tmp_path / "flight") <= limit * 2**20 < size_of(tmp_path / "flight") * (1 + 1 / len(steps))
    recorder = recorder_of(tmp_path, first_step=29, max_mb=0.001)
    record(recorder, [30], tokens=2000)  # by itself too large
    recorder.close()
    assert Recording(tmp_path).steps() == [30]


def test_a_step_at_which_something_spoke_is_kept_with_the_way_to_it(tmp_path):
    recorder = recorder_of(tmp_path, steps=3)
    record(recorder, range(1, 7))
    recorder.keep(6, "guard.max_grad_norm: 1e9", checkpoints=[2, 4])
    record(recorder, range(7, 12))
    recorder.keep(9, "a warning", checkpoints=None)
    recorder.keep(10, "guard.max_grad_norm: 1e9", checkpoints=[2, 4, 8])  # one checkpoint is held already
    record(recorder, range(12, 20))
    assert set(recorder.held) == {4}
    recorder.close()
    recording = Recording(tmp_path)
    assert recording.steps() == [5, 6, 9, 10, 17, 18, 19]
    assert [(kept.step, kept.base) for kept in recording.kept()] == [(6, 4), (9, None), (10, None)]
    again = recorder_of(tmp_path, first_step=19, steps=3)  # a run that goes on keeps them
    assert set(again.held) == {4}
    record(again, range(20, 25))
    again.close()
    assert recording.steps() == [5, 6, 9, 10, 22, 23, 24]


def test_kept_steps_go_last_when_there_is_no_room(tmp_path, caplog):
    one = 1.25 * _size_of_one(tmp_path / "one") / 2**20
    recorder = recorder_of(tmp_path / "many", steps=100, max_mb=5 * one)
    record(recorder, range(1, 5))
    recorder.keep(3, "first", checkpoints=[1])
    recorder.keep(4, "second", checkpoints=[3])
    record(recorder, range(5, 12))
    recorder.close()
    steps = Recording(tmp_path / "many").steps()
    assert steps[:3] == [2, 3, 4] and steps[-1] == 11 and len(steps) in (5, 6)
    smaller = recorder_of(tmp_path / "many", first_step=11, steps=100, max_mb=2 * one)
    record(smaller, [12])
    smaller.close()
    assert Recording(tmp_path / "many").steps() == [12] and not smaller.held
    assert "flight.max_mb" in caplog.text and "from 2 to 3" in caplog.text


def _size_of_one(workdir):
    recorder = recorder_of(workdir)
    record(recorder, [1])
    recorder.close()
    return size_of(workdir / "flight")


def test_a_run_that_goes_on_has_no_records_of_steps_that_it_makes_anew(tmp_path):
    recorder = recorder_of(tmp_path)
    record(recorder, range(1, 7))
    recorder.keep(6, "spoke", checkpoints=[4])
    recorder.close()
    recorder = recorder_of(tmp_path, first_step=4)
    recorder.close()
    recording = Recording(tmp_path)
    assert recording.steps() == [1, 2, 3, 4] and recording.kept() == [] and not recorder.held


def test_a_full_disk_costs_a_warning_and_not_the_run(tmp_path, caplog, monkeypatch):
    _, wanted = train(tmp_path / "whole", ASYNC)
    save, calls = dump.save, []

    def full(directory, groups, tokenizer=None):
        calls.append(directory)
        save(directory, groups, tokenizer)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.dump, "save", full)
    _, sink = train(tmp_path / "full", ASYNC)
    assert len(sink.steps) == len(wanted.steps) == 3
    assert [r.getMessage() for r in caplog.records if "flight" in r.getMessage()] == [
        "flight: No space left on device: the run goes on, and records no more batches"
    ]
    assert [path.name for path in (tmp_path / "full" / "flight").iterdir() if not path.name.startswith("config")] == ["1"]


def test_no_steps_no_files(tmp_path):
    train(tmp_path, ASYNC | {"flight.steps": 0})
    assert not (tmp_path / "flight").exists()
    with pytest.raises(UserError, match=r"has no flight/"):
        Recording(tmp_path)


class Killed(BaseException):
    """Stands for a crash in the middle of an update."""


def test_the_batch_of_a_step_that_crashed_is_there_and_crashes_again(tmp_path, monkeypatch):
    update = FakeLearner.update

    def crash(self, given):
        if self._adam["policy"].steps == 9:  # the second minibatch of step 5
            raise Killed
        return update(self, given)

    monkeypatch.setattr(FakeLearner, "update", crash)
    with pytest.raises(Killed):
        train(tmp_path, ASYNC | {"saver.freq_steps": 2, "total_train_epochs": 4})
    recording, replayer = Recording(tmp_path), replayer_of(tmp_path)
    found = recording.read(5)
    assert recording.steps()[-1] == 5 and set(found.scores) >= {"advantage", "proximal_logp"}
    replayer.go_to(4, found.config)
    with pytest.raises(Killed):
        replayer.make(found)


class BadHour(Repeat):
    """Its rewards are lower by 1 from the 150th to the 250th episode."""

    episodes = 0

    async def episode(self, generator, prompt, params, seed):
        trajectory = await super().episode(generator, prompt, params, seed)
        self.episodes += 1
        bad = 150 <= self.episodes < 250
        return dataclasses.replace(trajectory, reward=trajectory.reward - 1) if bad else trajectory


def test_a_guard_that_speaks_keeps_its_step_and_the_checkpoint_before_it(tmp_path):
    """However long the run goes on, and whatever it saves: the step is made again at its end."""
    saver = {"saver.freq_steps": 2, "saver.keep_last": 1, "flight.steps": 4}
    guard = {"guard.min_reward": -0.5, "guard.patience": 1, "guard.action": "warn"}
    _, sink = train(tmp_path, ASYNC | saver | guard | {"total_train_epochs": 12}, workflow=BadHour())
    recording = Recording(tmp_path)
    first = recording.kept()[0]
    assert first.why.startswith("guard.min_reward: rollout/reward -") and first.why.endswith(", bound -0.5: warn")
    assert 0 < first.base < first.step < recording.steps()[-4] - 4
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [first.base, 36]
    replayer, found = replayer_of(tmp_path), recording.read(first.step)
    replayer.go_to(found.header.parent, found.config)
    again = compare(sink.steps[first.step], replayer.make(found).metrics, dtype="float32", steps=1)
    assert len(again.differences) > 30 and all(d.equal for d in again.differences)


def test_a_run_that_a_guard_ends_has_its_last_step_kept(tmp_path):
    with pytest.raises(GuardrailError):
        train(tmp_path, ASYNC | {"guard.min_reward": 100.0, "guard.patience": 2})
    assert [kept.step for kept in Recording(tmp_path).kept()] == [2]


def test_a_torn_record_is_one_line(tmp_path):
    train(tmp_path, ASYNC)
    folder = tmp_path / "flight"
    (folder / "2" / "step.json").write_text("{")
    (folder / "3" / "scores.safetensors").write_bytes(b"no tensors")
    recording = Recording(tmp_path)
    assert list(recording.headers()) == [1, 3]
    for step in (2, 3):
        with pytest.raises(UserError) as raised:
            recording.read(step)
        assert str(folder / str(step)) in str(raised.value) and "\n" not in str(raised.value)
    tree = json.loads((folder / "1" / "step.json").read_text())
    (folder / "1" / "step.json").write_text(json.dumps(tree | {"format": "another"}))
    assert list(recording.headers()) == [3]
    (folder / "1" / "step.json").unlink()  # as in the middle of its deletion
    with pytest.raises(UserError, match=r"--step: 1 is not recorded in .*no step can be made again"):
        recording.read(1)
