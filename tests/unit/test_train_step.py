"""Batches that a step gives to the learner: whole groups, global weights, no needless passes."""

import dataclasses

import numpy as np
import pytest

from rljax.engines.fake import model
from rljax.engines.fake.learner import FakeLearner
from rljax.errors import UserError
from rljax.metrics.accumulator import PhaseTimer
from rljax.metrics.mean import Mean
from rljax.objective.advantages import advantages_of
from rljax.rollout.batch_metrics import TRAINED_TOKENS
from rljax.testing.harness import IN_MEMORY, VOCAB, make_config
from rljax.train_step import learn, split, supervise
from rljax.types import Finish, Group, Trajectory


class Recording(FakeLearner):
    """Keeps the batches it is given."""

    def __init__(self, config, model_dir):
        super().__init__(config, model_dir)
        self.calls = []

    def update(self, batch):
        self.calls.append(("update", batch))
        return super().update(batch)

    def score(self, batch):
        self.calls.append(("score", batch))
        return super().score(batch)

    def score_reference(self, batch):
        self.calls.append(("score_reference", batch))
        return super().score_reference(batch)

    def score_teacher(self, batch):
        self.calls.append(("score_teacher", batch))
        return super().score_teacher(batch)

    def named(self, name):
        return [batch for call, batch in self.calls if call == name]


def _groups(sizes=(3, 4, 2, 5), seed=0):
    random, groups = np.random.default_rng(seed), []
    for g, size in enumerate(sizes):
        trajectories = []
        for _ in range(size):
            length = int(random.integers(4, 14))
            ids = random.integers(1, VOCAB, length).astype(np.int32)
            mask = np.arange(length) >= 3
            logp = np.where(mask, random.normal(-4, 0.2, length), 0).astype(np.float32)
            versions = np.where(mask, random.integers(0, 3, length), -1).astype(np.int32)
            finish = [Finish.STOP, Finish.LENGTH][int(random.integers(2))]
            trajectories.append(Trajectory(ids, mask, logp, versions, float(random.normal()), {}, finish))
        groups.append(Group(f"0/{g}", tuple(trajectories)))
    return groups


def _learn(tmp_path, overrides, groups=None, version=2):
    config = make_config(overrides)
    if not (tmp_path / "model").exists():
        model.write(tmp_path / "model", np.random.default_rng(5).normal(size=(VOCAB, VOCAB)).astype(np.float32))
    learner = Recording(config, tmp_path / "model")
    metrics = learn(learner, config, groups or _groups(), version, PhaseTimer(lambda what: None)).metrics
    return learner, metrics


def _by_first_tokens(batches, name):
    """Arrays of each trajectory, whatever row it lies in."""
    found = {}
    for batch in batches:
        rows, starts = np.nonzero((batch.segment_ids > 0) & (batch.positions == 0))
        for row, start in zip(rows, starts, strict=True):
            inside = batch.segment_ids[row] == batch.segment_ids[row, start]
            found[tuple(batch.token_ids[row][inside])] = getattr(batch, name)[row][inside]
    return found


@pytest.mark.parametrize("minibatches,tokens", [(1, 16), (3, 16), (3, 64), (5, 32)])
def test_whole_groups_give_advantages_however_they_are_split(tmp_path, minibatches, tokens):
    groups = _groups()
    overrides = {"actor.ppo_n_minibatches": minibatches, "actor.mb_spec.max_tokens_per_row": tokens}
    learner, _ = _learn(tmp_path, overrides, groups)
    assert len(learner.named("update")) == minibatches
    got = _by_first_tokens(learner.named("update"), "advantage")
    want = advantages_of(groups, make_config(overrides)).advantage
    trajectories = [t for g in groups for t in g.trajectories]
    assert len(got) == len(trajectories)
    for trajectory, advantage in zip(trajectories, want, strict=True):
        np.testing.assert_array_equal(got[tuple(trajectory.token_ids)], advantage)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_split_invariance_of_the_gradient_over_packing(tmp_path, aggregation):
    tables = []
    for tokens, rows in ((13, 1), (16, 4), (512, 1)):
        overrides = {"actor.mb_spec.max_tokens_per_row": tokens, "actor.mb_spec.rows_per_mb": rows}
        overrides["actor.loss_aggregation"] = aggregation
        learner, _ = _learn(tmp_path, overrides)
        (batch,) = learner.named("update")
        _, gradient, _ = FakeLearner(make_config(overrides), tmp_path / "model").loss_and_gradient(batch, learner._objective)
        tables.append(gradient)
    for other in tables[1:]:
        np.testing.assert_allclose(other, tables[0], atol=1e-12)
    assert np.abs(tables[0]).max() > 1e-4


def test_weights_of_a_minibatch_are_normalized_over_it_all(tmp_path):
    learner, _ = _learn(tmp_path, {"actor.ppo_n_minibatches": 3, "actor.mb_spec.max_tokens_per_row": 16})
    for batch in learner.named("update"):
        assert batch.loss_weight.sum() == pytest.approx(1.0, rel=1e-6)  # token-mean
        np.testing.assert_array_equal(batch.loss_weight > 0, batch.loss_mask)


def test_no_score_pass_where_the_proximal_policy_is_known(tmp_path):
    learner, _ = _learn(tmp_path, {"actor.ppo_n_minibatches": 1})
    assert not learner.named("score") and learner.named("update")[0].proximal_logp is None
    learner, _ = _learn(tmp_path, {"actor.ppo_n_minibatches": 2, "actor.prox_logp_method": "loglinear"})
    assert not learner.named("score")
    first, second = learner.named("update")
    assert (first.interpolation[first.loss_mask] == 1).all()  # the current policy is the proximal one
    lag = 2 - second.versions[second.loss_mask]
    np.testing.assert_allclose(second.interpolation[second.loss_mask], lag / (lag + 0.5), rtol=1e-6)
    learner, _ = _learn(
        tmp_path, {"actor.ppo_n_minibatches": 2, "actor.use_decoupled_loss": False, "actor.recompute_logprob": False}
    )
    assert not learner.named("score") and learner.named("update")[0].proximal_logp is None


def test_the_error_of_the_loglinear_proximal_policy_is_told_where_it_is_asked_for_and_changes_no_update(tmp_path):
    loglinear = {"actor.ppo_n_minibatches": 3, "actor.prox_logp_method": "loglinear", "actor.optimizer.lr": 0.3}
    plain, without = _learn(tmp_path, loglinear)
    asked, metrics = _learn(tmp_path, loglinear | {"actor.prox_logp_error": True})
    assert [call for call, _ in asked.calls] == ["score", "update", "update", "update"]
    np.testing.assert_array_equal(asked.export(IN_MEMORY).params, plain.export(IN_MEMORY).params)
    error = metrics["ppo_actor/update/proximal_error"]
    assert error.min == 0 < error.max  # the first minibatch is at the proximal policy itself
    assert "ppo_actor/update/proximal_error" not in without


def test_several_minibatches_share_one_score_pass_of_the_weights_before_them(tmp_path):
    learner, metrics = _learn(tmp_path, {"actor.ppo_n_minibatches": 3, "actor.optimizer.lr": 0.3})
    assert [call for call, _ in learner.calls] == ["score", "update", "update", "update"]
    fresh = FakeLearner(make_config({}), tmp_path / "model")
    for batch in learner.named("update"):
        np.testing.assert_array_equal(batch.proximal_logp, fresh.score(batch))
    spread = metrics["ppo_actor/update/importance_weight"]
    assert spread.min < 1 < spread.max  # the later minibatches see weights that moved


def test_the_teacher_scores_the_batch_once_and_every_minibatch_has_its_log_probs(tmp_path):
    table = np.random.default_rng(6).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    model.write(tmp_path / "teacher", table)
    overrides = {"actor.ppo_n_minibatches": 2, "actor.distill.teacher": str(tmp_path / "teacher")}
    learner, _ = _learn(tmp_path, overrides)
    assert [call for call, _ in learner.calls] == ["score_teacher", "score", "update", "update"]
    teacher = FakeLearner(make_config({}), tmp_path / "teacher")
    for batch in learner.named("update"):
        np.testing.assert_array_equal(batch.teacher_logp, teacher.score(batch))
    learner, _ = _learn(tmp_path, {"actor.ppo_n_minibatches": 2})
    assert all(batch.teacher_logp is None for batch in learner.named("update"))


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_reference_is_the_model_that_rl_began_with_however_far_the_policy_has_moved(tmp_path, placement):
    overrides = {
        "actor.kl_ctl": 0.5,
        "actor.kl_placement": placement,
        "actor.kl_estimator": "k1",
        "actor.optimizer.lr": 0.3,
        "actor.ppo_n_minibatches": 2,
        "gconfig.temperature": 0.7,
    }
    groups, config = _groups(), make_config(overrides)
    learner, _ = _learn(tmp_path, overrides, groups)
    learner.calls.clear()
    metrics = learn(learner, config, groups, 2, PhaseTimer(lambda what: None)).metrics
    (scored,) = learner.named("score_reference")
    assert [call for call, _ in learner.calls] == ["score_reference", "score", "update", "update"]
    initial = FakeLearner(config, tmp_path / "model")
    assert np.abs(initial.score(scored) - FakeLearner.score(learner, scored)).max() > 0.1  # the policy has moved
    reference = _by_first_tokens([scored.replace(reference_logp=initial.score(scored))], "reference_logp")
    trajectories = [t for g in groups for t in g.trajectories]
    found = _by_first_tokens(learner.named("update"), "reference_logp" if placement == "loss" else "advantage")
    if placement == "loss":
        for tokens, logp in reference.items():
            np.testing.assert_array_equal(found[tokens], logp)
        assert "ppo_actor/kl_reward" not in metrics
        return
    kl = np.concatenate([(t.behavior_logp - reference[tuple(t.token_ids)])[t.loss_mask] for t in trajectories])
    assert metrics["ppo_actor/kl_reward"].value == pytest.approx(-0.5 * kl.mean(), rel=1e-5) != 0
    want = advantages_of(groups, config, reference_logp=[reference[tuple(t.token_ids)] for t in trajectories]).advantage
    plain = advantages_of(groups, make_config({})).advantage
    for trajectory, advantage, without in zip(trajectories, want, plain, strict=True):
        np.testing.assert_array_equal(found[tuple(trajectory.token_ids)], advantage)
        assert np.abs(advantage - without)[trajectory.loss_mask].max() > 1e-3
    assert all(batch.reference_logp is None for batch in learner.named("update"))


@pytest.mark.parametrize("constant", [None, 7])
def test_the_constant_of_an_aggregation_divides_the_sum(tmp_path, constant):
    aggregation = {"actor.loss_aggregation": "seq-mean-token-sum", "actor.loss_aggregation_constant": constant}
    groups = _groups()
    learner, _ = _learn(tmp_path, aggregation, groups)
    (batch,) = learner.named("update")
    sequences = sum(len(g.trajectories) for g in groups)
    tokens = constant or make_config({}).gconfig.max_new_tokens
    np.testing.assert_allclose(batch.loss_weight[batch.loss_mask], 1 / (sequences * tokens), rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5, 14, 99])
def test_minibatches_hold_whole_trajectories_and_never_nothing(n):
    trajectories = [t for g in _groups() for t in g.trajectories]
    untrained = dataclasses.replace(trajectories[3], loss_mask=np.zeros_like(trajectories[3].loss_mask))
    trajectories[3] = untrained
    parts = split(trajectories, n)
    assert len(parts) == min(n, len(trajectories) - 1) and all(parts)
    assert sorted(i for part in parts for i in part) == [i for i in range(len(trajectories)) if i != 3]
    assert all(part == sorted(part) for part in parts)


def test_truncated_completions_are_not_trained_on_where_asked_and_a_batch_of_them_is_no_step(tmp_path):
    groups = _groups()
    learner, metrics = _learn(tmp_path, {"actor.mask_no_eos": True}, groups)
    lengths = _by_first_tokens(learner.named("update"), "loss_mask")
    for trajectory in (t for g in groups for t in g.trajectories):
        assert (tuple(trajectory.token_ids) in lengths) == (trajectory.finish is not Finish.LENGTH)
    cut = [Group(g.uid, tuple(dataclasses.replace(t, finish=Finish.LENGTH) for t in g.trajectories)) for g in groups]
    learner, metrics = _learn(tmp_path, {"actor.mask_no_eos": True}, cut)
    assert not learner.calls and metrics["ppo_actor/no_eos_ratio"].value == 1.0


def test_a_trajectory_longer_than_a_row_is_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match="max_tokens_per_row: a trajectory has 13 tokens, a row holds 8"):
        _learn(tmp_path, {"actor.mb_spec.max_tokens_per_row": 8})


def test_a_supervised_step_is_the_mean_negative_log_likelihood(tmp_path):
    config = make_config({})
    model.make_model(tmp_path / "model", VOCAB)
    examples = [t for g in _groups() for t in g.trajectories]
    metrics = supervise(FakeLearner(config, tmp_path / "model"), config, examples)
    assert metrics["warmup/nll"].value == pytest.approx(np.log(VOCAB), rel=1e-6)  # of the uniform policy


def test_metrics_of_a_supervised_step_that_are_not_the_updates_keep_their_names(tmp_path):
    class Shadowed(FakeLearner):
        def update_supervised(self, batch):
            return super().update_supervised(batch) | {"parity/excess": Mean(2, 1), "timeperf/shadow": Mean(1, 1)}

    model.make_model(tmp_path / "model", VOCAB)
    for loss, prefix in (("ppo", "warmup"), ("sft", "sft")):
        config = make_config({"actor.loss": loss})
        metrics = supervise(Shadowed(config, tmp_path / "model"), config, [t for g in _groups() for t in g.trajectories])
        names = {name for name in metrics if not name.startswith(f"{prefix}/")}
        assert {f"{prefix}/loss", f"{prefix}/grad_norm"} <= metrics.keys()
        assert names == {"parity/excess", "timeperf/shadow", TRAINED_TOKENS}
