"""The shared part of learners, on numpy arrays: phases, checkpoints, states of other engines."""

import json
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from rljax.checkpoints.background import BackgroundWrite
from rljax.checkpoints.integrity import write_meta
from rljax.checkpoints.portable import COUNTS
from rljax.engines.common.learner import PhasedLearner
from rljax.engines.common.parts import COUNTED, PARTS, counts_of, parts_of, stored_state
from rljax.errors import UserError
from rljax.hf.read_model import read_model
from rljax.metrics.mean import Mean
from rljax.testing import models
from rljax.testing.learner_batches import config_of, episodes, pack

CRITIC = {"actor.adv_estimator": "gae", "actor.kl_ctl": 0.1, "warmup.steps": 2}
NAME = "w"  # of the one parameter


class Adam:
    """Moments of one number, and the settings it was made with."""

    def __init__(self, total_steps):
        self.total_steps, self.lr_factor = total_steps, 1.0
        self.state = {"mu": {NAME: np.zeros(1)}, "nu": {NAME: np.zeros(1)}, "count": np.int64(0)}

    def step(self):
        self.state = {
            "mu": {NAME: self.state["mu"][NAME] + 1},
            "nu": {NAME: self.state["nu"][NAME] + 2},
            "count": self.state["count"] + 1,
        }

    def scale_lr(self, factor):
        self.lr_factor = factor

    def saved(self):
        return self.state

    def load(self, saved):
        self.state = {kind: saved[kind] for kind in self.state}


class Critic(Adam):
    def __init__(self, total_steps, weights):
        super().__init__(total_steps)
        self.params = {NAME: weights[NAME].copy()}

    def saved(self):
        return {"params": self.params, **super().saved()}

    def load(self, saved):
        super().load(saved)
        self.params = saved["params"]


def _done():
    future = Future()
    future.set_result(None)
    return future


class NumpyLearner(PhasedLearner[Adam, Critic]):
    """One parameter; a step of the policy adds 1 to it, a supervised step 10."""

    format = "numpy/1"

    def __init__(self, config, model_dir):
        super().__init__(config, model_dir, read_model(model_dir))
        self.weights = {NAME: np.zeros(1)}
        self._start()

    def _make_actor(self, total_steps):
        return Adam(total_steps)

    _make_warmup = _make_actor

    def _make_critic(self, total_steps):
        return Critic(total_steps, self.weights)

    def _copy_policy(self):
        return {NAME: self.weights[NAME].copy()}

    def _load_teacher(self, directory):
        return lambda batch: np.full(batch.shape, -1.0, np.float32)

    def _moved(self, phase, by):
        phase.step()
        self.weights = {NAME: self.weights[NAME] + by}
        return {"moved": Mean(by, 1)}

    def _policy_step(self, phase, batch, keep):
        return self._moved(phase, 1)

    def _supervised_step(self, phase, batch, keep):
        return self._moved(phase, 10)

    def _critic_step(self, critic, batch):
        raise NotImplementedError  # no step of the critic is taken here

    def _score_with(self, weights, batch):
        return np.full(batch.shape, weights[NAME][0], np.float32)

    def _weights(self):
        return self.weights

    def _set_weights(self, weights):
        self.weights = weights

    def _write(self, directory, tree, meta):
        (directory / "tree").mkdir(parents=True)
        (directory / "tree" / "arrays.json").write_text(json.dumps(tree, default=lambda x: x.tolist()))
        write_meta(directory, meta)

    def _begin_write(self, directory, tree, meta):
        self._write(directory, tree, meta)
        return BackgroundWrite(_done(), _done())

    def _read(self, directory, like):
        tree = _arrays(json.loads((directory / "tree" / "arrays.json").read_text()))
        if _paths(tree) != _paths(like):
            raise UserError("checkpoint: of another run")
        return tree

    def _to_named(self, tree):
        flat = _flat(tree)
        named = {part: {NAME: flat[f"{path}/{NAME}"]} for part, path in PARTS.items() if f"{path}/{NAME}" in flat}
        return named | {COUNTS: {name: flat[path] for name, path in COUNTED.items() if path in flat}}

    def _from_named(self, state, tree, updates):
        own = [part for part in self._to_named(tree) if part != COUNTS]
        found = _flat(tree)
        for part in parts_of(state, own):
            found[f"{PARTS[part]}/{NAME}"] = state[part][NAME]
        for name, count in counts_of(state, updates).items():
            if COUNTED[name] in found:
                found[COUNTED[name]] = np.int64(count)
        return _nested(found)

    def _together(self, what, action):
        return action()

    def _devices(self):
        return "cpu", 1

    def _memory_in_use(self):
        return None


def _arrays(tree):
    return {name: _arrays(node) if isinstance(node, dict) else np.array(node) for name, node in tree.items()}


def _flat(tree, prefix=""):
    found = {}
    for name, node in tree.items():
        found |= _flat(node, f"{prefix}{name}/") if isinstance(node, dict) else {f"{prefix}{name}": node}
    return found


def _nested(flat):
    tree = {}
    for path, node in flat.items():
        *parents, name = path.split("/")
        inside = tree
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[name] = node
    return tree


def _paths(tree):
    return sorted(_flat(tree))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return models.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batch():
    return pack(episodes(2), [[0], [1]], 32)


def state_of(learner):
    return json.dumps(learner.named_state(), default=lambda x: x.tolist(), sort_keys=True)


def test_reinforcement_begins_at_once_without_a_warm_up_and_else_with_the_first_call_that_needs_it(model_dir, batch):
    assert NumpyLearner(config_of(), model_dir)._phases.names == ["rl"]
    for call in ("update", "score_reference"):
        learner = NumpyLearner(config_of(**CRITIC), model_dir)
        assert learner._phases.names == []
        learner.update_supervised(batch)
        learner.update_supervised(batch)
        assert learner._phases.names == ["supervised"]
        getattr(learner, call)(batch)
        assert learner._phases.names == ["rl"]  # the warm-up's moments are let go
        assert (learner.score_reference(batch) == 20).all() and learner._critic().params[NAME] == 20  # as the warm-up left it


def test_schedules_run_over_all_optimizer_steps_of_their_phase(model_dir, batch):
    minibatches = {"actor.ppo_n_minibatches": 3, "critic.ppo_n_minibatches": 2, "total_train_steps": 7}
    learner = NumpyLearner(config_of(**CRITIC | minibatches), model_dir)
    learner.update_supervised(batch)
    assert learner._phases.supervised.total_steps == 2
    learner.update(batch)
    assert (learner._phases.rl.actor.total_steps, learner._critic().total_steps) == (21, 14)
    sft = NumpyLearner(config_of(**{"actor.loss": "sft", "total_train_steps": 7, "actor.ppo_n_minibatches": 3}), model_dir)
    sft.update_supervised(batch)
    assert sft._phases.names == ["rl"] and sft._phases.rl.actor.total_steps == 7  # no warm-up: the policy's own optimizer


def test_a_factor_of_the_learning_rate_is_of_every_optimizer_also_of_those_that_begin_later(model_dir, batch):
    learner = NumpyLearner(config_of(**CRITIC), model_dir)
    learner.update_supervised(batch)
    learner.scale_lr(0.25)
    assert learner._phases.supervised.lr_factor == 0.25
    learner.update(batch)
    assert learner._phases.rl.actor.lr_factor == learner._critic().lr_factor == 0.25
    learner.scale_lr(0.5)
    assert learner._phases.rl.actor.lr_factor == learner._critic().lr_factor == 0.5


@pytest.mark.parametrize("supervised, updates", [(0, 0), (1, 0), (2, 3)])
def test_a_restored_learner_is_the_one_that_was_saved_in_any_phase(model_dir, batch, tmp_path, supervised, updates):
    learner = NumpyLearner(config_of(**CRITIC), model_dir)
    for _ in range(supervised):
        learner.update_supervised(batch)
    for _ in range(updates):
        learner.update(batch)
    learner.save(tmp_path / "saved")
    resumed, named = (NumpyLearner(config_of(**CRITIC), model_dir) for _ in range(2))
    resumed.restore(tmp_path / "saved")
    named.load_named_state(learner.named_state(), learner._updates)
    for other in (resumed, named):
        assert other._phases.names == learner._phases.names and other._updates == updates
        assert state_of(other) == state_of(learner)


def test_what_can_not_be_restored_changes_nothing(model_dir, batch, tmp_path):
    learner = NumpyLearner(config_of(**CRITIC), model_dir)
    learner.update(batch)
    learner.save(tmp_path / "critic")
    plain = NumpyLearner(config_of(), model_dir)
    plain.update(batch)
    before = state_of(plain)
    with pytest.raises(UserError, match="of another run"):
        plain.restore(tmp_path / "critic")
    missing = {part: arrays for part, arrays in learner.named_state().items() if part != "nu"}
    with pytest.raises(UserError, match="the other engine's state lacks nu"):
        plain.load_named_state(missing, 5)
    assert state_of(plain) == before and plain._updates == 1


def test_a_critic_or_a_reference_that_a_state_lacks_stays_as_it_began(model_dir, batch):
    donor, learner = (NumpyLearner(config_of(**CRITIC), model_dir) for _ in range(2))
    donor.update(batch)
    state = {part: arrays for part, arrays in donor.named_state().items() if not part.startswith(("critic", "reference"))}
    learner.load_named_state(state, 4)
    assert learner._updates == 4 and learner.weights[NAME] == 1
    assert (learner.score_reference(batch) == 0).all() and learner._critic().params[NAME] == 0


def test_optimizer_steps_without_counts_are_the_updates():
    assert counts_of({}, 7) == {"actor": 7}
    assert counts_of({COUNTS: {"critic": np.int64(3), "other": 1}}, 7) == {"actor": 7, "critic": 3}


def test_a_checkpoint_has_the_parts_that_its_arrays_are_in():
    paths = ["policy/a.b", "rl/actor/mu/a.b", "rl/actor/nu/a.b", "rl/actor/count", "rl/critic/params/value_head"]
    read = []
    state = stored_state(paths, lambda path: read.append(path) or {"a.b": np.ones(1)}, lambda path: len(path))
    assert list(state) == ["params", "mu", "nu", "critic/params", COUNTS] and not read
    assert state["mu"] == {"a.b": 1} and read == ["rl/actor/mu"]
    assert state[COUNTS] == {"actor": len("rl/actor/count")}


def test_a_teacher_is_there_from_the_start(model_dir, batch):
    config = config_of(**CRITIC | {"actor.distill.teacher": "somewhere"})
    learner = NumpyLearner(config, model_dir)
    assert (learner.score_teacher(batch) == -1).all()
    assert learner._phases.names == []  # scoring with it begins nothing


def test_settings_without_what_a_call_needs_are_named(model_dir, batch):
    learner = NumpyLearner(config_of(), model_dir)
    for call, key in ((learner.score_reference, "actor.kl_ctl"), (learner.score_teacher, "actor.distill.teacher")):
        with pytest.raises(UserError, match=f"^{key}: "):
            call(SimpleNamespace())
    with pytest.raises(UserError, match=r"^actor\.adv_estimator: 'grpo' has no critic"):
        learner._critic()
