"""Required behavior of every learner, whatever its framework.

    class TestMyLearner(LearnerContract):
        def make(self, config, model_dir):            # as Plugin.make_learner, on one device
            return MyLearner(config, Pool("mine"), model_dir)

The models are tiny Hugging Face directories (models.py), the configs the defaults in float32 with
the changes of each test. Expectations are derived: a learning rate of 0, another packing of the
same trajectories, a permutation, a save in between.
"""

from __future__ import annotations

import abc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rljax.config.schema import Config
from rljax.engine import ExportToDirectory, Learner, WeightsInDirectory
from rljax.errors import UserError
from rljax.metrics.mean import Mean, merge
from rljax.objective.explained_variance import explained_variance
from rljax.objective.spec import WITH_ADVANTAGE
from rljax.testing import models
from rljax.testing.learner_batches import (
    UPDATE,
    Episode,
    assert_means_close,
    config_of,
    episodes,
    first_fit,
    halves,
    pack,
    unpack,
)
from rljax.testing.models import VOCABULARY


class LearnerContract(abc.ABC):
    """Tests of the contract.

    Subclasses say how a learner is made, and set `tolerance` to the error of float32 on their
    device.
    """

    tolerance = 2e-5  # relative and absolute, float32 log-probs and metrics
    has_schedules = True  # of the learning rate
    restores_bitwise = True  # a restored learner gives the same bits on this device

    @abc.abstractmethod
    def make(self, config: Config, model_dir: Path) -> Learner:
        """Returns a new learner of the model in a directory.

        Several may live at once; each test closes its own.
        """

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The model of all tests of a class, which none of them changes."""
        return models.make_model(tmp_path_factory.mktemp("model"))

    # Score

    def test_packed_rows_padding_and_order_change_no_log_prob(self, model_dir: Path) -> None:
        items = episodes(9)
        learner = self.make(config_of(), model_dir)
        alone_rows = [[i] for i in range(len(items))]
        alone = unpack(learner.score(pack(items, alone_rows, 32)), items, alone_rows)
        packed_rows = first_fit(items, 64)
        assert len(packed_rows) < len(items)
        for rows, length, start in (
            (packed_rows, 64, 0),
            (packed_rows[::-1], 64, 0),
            ([row[::-1] for row in packed_rows], 64, 0),
            (packed_rows, 75, 11),  # left-padded
            (alone_rows, 50, 13),
        ):
            batch = pack(items, rows, length, start=start)
            scored = learner.score(batch)
            assert scored.shape == batch.shape
            assert scored.dtype == np.float32
            assert not scored[~batch.loss_mask].any()
            for index, logp in unpack(scored, items, rows, start=start).items():
                np.testing.assert_allclose(logp, alone[index], atol=self.tolerance)
        learner.close()

    def test_log_probs_are_those_of_a_distribution(self, model_dir: Path) -> None:
        """Probabilities of all tokens after a prefix add up to 1, and temperature flattens them."""
        prefix = [5, 17, 40]
        items = [
            Episode(
                {
                    **{name: array[:4] * 0 for name, array in episodes(1, seed=1, longest=9)[0].arrays.items()},
                    **{"token_ids": np.array([*prefix, token], np.int32), "loss_mask": np.array([0, 0, 0, 1], bool)},
                }
            )
            for token in range(VOCABULARY)
        ]
        batch = pack(items, [[i] for i in range(VOCABULARY)], 4)
        logits = {}
        for temperature in (1.0, 0.6):
            learner = self.make(config_of(**{"gconfig.temperature": temperature}), model_dir)
            logp = learner.score(batch)[:, 3].astype(np.float64)
            assert math.isclose(np.exp(logp).sum(), 1, rel_tol=1e-5)
            logits[temperature] = (logp - logp.mean()) * temperature
            learner.close()
        np.testing.assert_allclose(logits[0.6], logits[1.0], atol=1e-5)

    # Update

    def test_zero_learning_rate_changes_nothing_in_any_minibatch(self, model_dir: Path) -> None:
        # Not at temperature 1, so that an update and a score at different ones are told apart
        config = config_of(**{"actor.optimizer.lr": 0.0, "actor.ppo_n_minibatches": 2, "gconfig.temperature": 0.6})
        learner = self.make(config, model_dir)
        items = episodes(8)
        batch = pack(items, first_fit(items, 64), 64)
        before = learner.score(batch)
        for _ in range(3):
            batch = batch.replace(proximal_logp=learner.score(batch))
            means = merge(learner.update(part) for part in halves(batch))
            assert means[f"{UPDATE}/clip_ratio"].value == means[f"{UPDATE}/lr"].value == 0
            # A half has fewer rows than what was scored, so that a matrix product may be summed in another order
            assert abs(means[f"{UPDATE}/approx_kl"].value) < self.tolerance
            ratio = means[f"{UPDATE}/importance_weight"]
            assert 1 - self.tolerance < ratio.min <= ratio.max < 1 + self.tolerance
        np.testing.assert_array_equal(learner.score(batch), before)
        learner.close()

    def test_the_first_minibatch_is_on_policy(self, model_dir: Path) -> None:
        """The proximal policy is the current one if no proximal log-probs are given."""
        learner = self.make(config_of(), model_dir)
        items = episodes(8)
        for item in items[::2]:
            item.arrays["advantage"][:] = 0  # metrics are of all trained tokens, and by name of those with an advantage
        means = learner.update(pack(items, first_fit(items, 64), 64))
        assert means[f"{WITH_ADVANTAGE}/entropy"].count == sum(int(e.arrays["loss_mask"].sum()) for e in items[1::2])
        ratio = means[f"{UPDATE}/importance_weight"]
        assert (ratio.value, ratio.min, ratio.max) == (1.0, 1.0, 1.0)
        assert ratio.count == sum(int(e.arrays["loss_mask"].sum()) for e in items)
        learner.close()

    @pytest.mark.parametrize("level", ["token", pytest.param("sequence", marks=pytest.mark.slow)])
    def test_split_invariance_of_metrics_and_the_step_over_packing_and_micro_batches(self, model_dir: Path, level: str) -> None:
        levels = {"actor.importance_sampling_level": level, "actor.behav_imp_weight_level": level}
        items = episodes(12)
        packed = first_fit(items, 64)
        layouts = [(packed, 64, 8), (packed[::-1], 80, 1), ([[i] for i in range(12)], 32, 5)]
        results = []
        for rows, length, rows_per_mb in layouts:
            learner = self.make(config_of(**{"actor.mb_spec.rows_per_mb": rows_per_mb, **levels}), model_dir)
            batch = pack(items, rows, length)
            drifted = np.where(batch.loss_mask, batch.behavior_logp + 0.1 * np.sin(batch.token_ids), 0).astype(np.float32)
            means = learner.update(batch.replace(proximal_logp=drifted))
            results.append((means, unpack(learner.score(batch), items, rows)))
            learner.close()
        for means, scored in results[1:]:
            assert_means_close(means, results[0][0], 10 * self.tolerance)
            for index, logp in scored.items():
                np.testing.assert_allclose(logp, results[0][1][index], atol=20 * self.tolerance)

    def test_an_update_makes_what_was_rewarded_more_likely(self, model_dir: Path) -> None:
        items = episodes(8)
        learner = self.make(config_of(), model_dir)
        batch = pack(items, first_fit(items, 64), 64)
        before = learner.score(batch)
        batch = batch.replace(behavior_logp=before, proximal_logp=before)
        learner.update(batch)
        gained = learner.score(batch) - before
        assert (batch.loss_weight * batch.advantage * gained).sum() > 0
        learner.close()

    def test_a_scaled_learning_rate_is_that_of_another_config_and_outlasts_a_restore(
        self, model_dir: Path, tmp_path: Path
    ) -> None:
        items, found = episodes(6), []
        batch = pack(items, first_fit(items, 64), 64)
        for rate, factor in ((1e-2, 0.25), (2.5e-3, 1.0)):
            rates = {"actor.optimizer.lr": rate, "critic.optimizer.lr": rate, "actor.adv_estimator": "gae"}
            learner = self.make(config_of(**rates), model_dir)
            learner.scale_lr(factor)
            learner.save(tmp_path / str(rate))
            learner.restore(tmp_path / str(rate))
            for _ in range(2):
                means = learner.update(batch) | learner.update_critic(batch)
            found.append((means, learner.score(batch), learner.values(batch)))
            learner.close()
        (means, scores, values), (expected, expected_scores, expected_values) = found
        assert_means_close(means, expected, self.tolerance)
        np.testing.assert_allclose(scores, expected_scores, atol=20 * self.tolerance)
        np.testing.assert_allclose(values, expected_values, atol=20 * self.tolerance)

    @pytest.mark.parametrize("key", ["max_approx_kl", "max_grad_norm"])
    def test_a_step_out_of_bounds_is_not_taken_and_one_within_is_as_without_bounds(self, model_dir: Path, key: str) -> None:
        items = episodes(6)
        batch = pack(items, first_fit(items, 64), 64)
        drifted = np.where(batch.loss_mask, batch.behavior_logp + 0.1, 0).astype(np.float32)
        batch = batch.replace(proximal_logp=drifted)  # so that the KL is not 0
        after = {}
        for bound in (None, 1e6, 1e-6):
            learner = self.make(config_of(**{f"guard.{key}": bound, "guard.actions": {key: "skip"}}), model_dir)
            before = learner.score(batch)
            means = learner.update(batch)
            after[bound] = learner.score(batch)
            assert means[f"{UPDATE}/grad_norm"].value > 1e-6
            assert (f"{UPDATE}/out_of_bounds" in means) == (bound is not None)
            if bound is not None:
                assert means[f"{UPDATE}/out_of_bounds"].value == (bound == 1e-6)
            learner.close()
        np.testing.assert_array_equal(after[1e-6], before)
        np.testing.assert_array_equal(after[1e6], after[None])
        assert not np.array_equal(after[None], before)

    @pytest.mark.parametrize(("loss", "optimizer"), [("sft", "actor.optimizer"), ("ppo", "warmup.optimizer")])
    def test_supervised_steps_are_taken_with_the_optimizer_of_sft_or_of_the_warm_up(
        self, model_dir: Path, loss: str, optimizer: str
    ) -> None:
        still = {"actor.optimizer.lr": 0.0, "warmup.optimizer.lr": 0.0, "actor.loss": loss, "warmup.steps": 4}
        items = episodes(6)
        batch = pack(items, first_fit(items, 64), 64)
        for rate in (0.0, 1e-2):
            learner = self.make(config_of(**(still | {f"{optimizer}.lr": rate})), model_dir)
            before = learner.score(batch)
            learner.update_supervised(batch)
            assert np.array_equal(learner.score(batch), before) == (rate == 0)
            learner.close()

    def test_supervised_steps_lower_the_negative_log_likelihood(self, model_dir: Path) -> None:
        learner = self.make(config_of(**{"warmup.steps": 5}), model_dir)
        items = episodes(8)
        batch = pack(items, first_fit(items, 64), 64)
        losses = [learner.update_supervised(batch)[f"{UPDATE}/nll"].value for _ in range(5)]
        assert losses == sorted(losses, reverse=True)
        expected = -learner.score(batch)[batch.loss_mask].mean()
        assert math.isclose(learner.update_supervised(batch)[f"{UPDATE}/nll"].value, expected, rel_tol=1e-5)
        learner.close()

    # Reference and critic

    def test_the_reference_stays_where_the_policy_began(self, model_dir: Path) -> None:
        learner = self.make(config_of(**{"actor.kl_ctl": 0.1, "actor.entropy_coef": 0.01}), model_dir)
        items = episodes(6)
        batch = pack(items, first_fit(items, 64), 64)
        reference = learner.score_reference(batch)
        np.testing.assert_allclose(reference, learner.score(batch), atol=self.tolerance)
        means = learner.update(batch.replace(reference_logp=reference))
        assert means[f"{UPDATE}/reference_kl"].value == pytest.approx(0, abs=1e-6)
        np.testing.assert_array_equal(learner.score_reference(batch), reference)
        assert np.abs(learner.score(batch) - reference).max() > 1e-3
        learner.close()

    def test_what_a_config_does_not_have_is_refused_by_its_key(self, model_dir: Path) -> None:
        learner = self.make(config_of(), model_dir)
        batch = pack(episodes(2), [[0], [1]], 32)
        with pytest.raises(UserError, match=r"actor\.kl_ctl"):
            learner.score_reference(batch)
        with pytest.raises(UserError, match=r"actor\.adv_estimator"):
            learner.values(batch)
        learner.close()

    def test_the_critic_starts_at_zero_and_learns_the_returns_alone(self, model_dir: Path) -> None:
        learner = self.make(config_of(**{"actor.adv_estimator": "gae"}), model_dir)
        items = episodes(6)
        batch = pack(items, first_fit(items, 64), 64)
        policy = learner.score(batch)
        assert not learner.values(batch).any()
        history = []
        for _ in range(30):
            batch = batch.replace(values=learner.values(batch))
            history.append(learner.update_critic(batch))
        assert batch.returns is not None and batch.values is not None
        trained = batch.returns[batch.loss_mask].astype(np.float64)
        assert explained_variance(history[0]).value == pytest.approx(0, abs=1e-5)
        assert history[0]["critic/loss"].value == pytest.approx((trained**2).mean() / 2, rel=1e-5)
        left = trained - batch.values[batch.loss_mask]
        explained = explained_variance(history[-1]).value
        assert explained == pytest.approx(1 - left.var() / trained.var(), rel=1e-3)
        assert explained > 0.2
        np.testing.assert_array_equal(learner.score(batch), policy)
        learner.close()

    # Checkpoints and weights

    @pytest.mark.parametrize("settings", [{}, {"actor.adv_estimator": "gae", "actor.kl_ctl": 0.1}])
    def test_a_restored_learner_goes_on_as_if_never_stopped(
        self, model_dir: Path, tmp_path: Path, settings: dict[str, Any]
    ) -> None:
        # Six optimizer steps: a schedule is over those of all minibatches
        schedule = {"actor.optimizer.lr_scheduler_type": "linear", "total_train_steps": 3, "actor.ppo_n_minibatches": 2}
        config = config_of(**schedule, **settings)
        items = episodes(8)
        batch = pack(items, first_fit(items, 64), 64)
        learner = self.make(config, model_dir)
        batch = batch.replace(reference_logp=learner.score_reference(batch) if config.actor.kl_ctl else None)

        def go_on(learner: Learner) -> tuple[dict[str, Mean], np.ndarray]:
            means = learner.update(batch)
            if config.actor.adv_estimator == "gae":
                means |= learner.update_critic(batch)
            return means, learner.score(batch)

        for _ in range(2):
            go_on(learner)
        learner.save(tmp_path / "checkpoint")
        want_means, want = go_on(learner)
        learner.close()
        resumed = self.make(config, model_dir)
        resumed.restore(tmp_path / "checkpoint")
        means, scored = go_on(resumed)
        tolerance = 0.0 if self.restores_bitwise else 10 * self.tolerance
        np.testing.assert_allclose(scored, want, atol=tolerance)
        assert_means_close(means, want_means, tolerance)
        # The moments of the steps before came back too: an optimizer that begins anew says so here, and the doctor reads it
        assert means[f"{UPDATE}/optimizer_steps"].value == 3
        if self.has_schedules:
            assert means[f"{UPDATE}/lr"].value == pytest.approx(config.actor.optimizer.lr * (1 - 2 / 6), rel=1e-5)
        resumed.close()

    @pytest.mark.parametrize("settings", [{"actor.kl_ctl": 0.1}, {"actor.adv_estimator": "gae"}])
    def test_a_save_beside_updates_holds_the_learner_as_it_was(
        self, model_dir: Path, tmp_path: Path, settings: dict[str, Any]
    ) -> None:
        """Calls that change weights, moments or the critic, or copy others in, come right after it."""
        config = config_of(**settings)
        items = episodes(8)
        batch = pack(items, first_fit(items, 64), 64)
        learner, resumed = self.make(config, model_dir), self.make(config, model_dir)
        batch = batch.replace(reference_logp=learner.score_reference(batch) if config.actor.kl_ctl else None)

        def step(learner: Learner) -> list[dict[str, Mean]]:
            return [learner.update(batch), *([learner.update_critic(batch)] if "actor.adv_estimator" in settings else [])]

        step(learner)
        written = [learner.begin_save(tmp_path / "first")]
        if config.actor.kl_ctl:
            learner.score_reference(batch)
        want = step(learner)
        written[0].result()
        written.append(learner.begin_save(tmp_path / "second"))
        then, scored = step(learner), learner.score(batch)
        written[1].result()
        tolerance = 0.0 if self.restores_bitwise else 10 * self.tolerance
        for name, means in (("first", want), ("second", then)):
            resumed.restore(tmp_path / name)
            for ours, theirs in zip(step(resumed), means, strict=True):
                assert_means_close(ours, theirs, tolerance)
        np.testing.assert_allclose(resumed.score(batch), scored, atol=tolerance)
        learner.close()
        resumed.close()

    def test_a_checkpoint_in_the_middle_of_the_warm_up_is_of_the_warm_up(self, model_dir: Path, tmp_path: Path) -> None:
        config = config_of(**{"warmup.steps": 4, "warmup.optimizer.lr_scheduler_type": "cosine", "actor.kl_ctl": 0.1})
        items = episodes(8)
        batch = pack(items, first_fit(items, 64), 64)
        learner, resumed = self.make(config, model_dir), self.make(config, model_dir)
        for _ in range(2):
            learner.update_supervised(batch)
        learner.save(tmp_path / "warm")
        resumed.restore(tmp_path / "warm")
        for _ in range(2):
            assert_means_close(resumed.update_supervised(batch), learner.update_supervised(batch), self.tolerance)
        reference = learner.score_reference(batch)  # of the policy that the warm-up left
        np.testing.assert_allclose(reference, learner.score(batch), atol=self.tolerance)
        learner.update(batch.replace(reference_logp=reference))
        learner.save(tmp_path / "rl")
        resumed.restore(tmp_path / "rl")
        np.testing.assert_allclose(resumed.score_reference(batch), reference, atol=self.tolerance)
        np.testing.assert_allclose(resumed.score(batch), learner.score(batch), atol=self.tolerance)
        learner.close()
        resumed.close()

    def test_garbage_is_refused_and_leaves_the_learner_usable(self, model_dir: Path, tmp_path: Path) -> None:
        items = episodes(6)
        batch = pack(items, first_fit(items, 64), 64)
        learner = self.make(config_of(), model_dir)
        learner.update(batch)
        before = learner.score(batch)
        learner.save(tmp_path / "good")
        other = self.make(config_of(), models.make_model(tmp_path / "other model", num_layers=3))
        other.save(tmp_path / "other")
        other.close()
        (tmp_path / "empty").mkdir()
        (tmp_path / "garbage").mkdir()
        for file in (p for p in (tmp_path / "good").rglob("*") if p.is_file()):
            target = tmp_path / "garbage" / file.relative_to(tmp_path / "good")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"\x00garbage")
        for name in ("absent", "empty", "garbage", "other"):
            with pytest.raises(UserError) as caught:
                learner.restore(tmp_path / name)
            assert "\n" not in str(caught.value), name
            np.testing.assert_array_equal(learner.score(batch), before)
        learner.update(batch)
        learner.restore(tmp_path / "good")
        np.testing.assert_array_equal(learner.score(batch), before)
        learner.close()

    def test_an_exported_directory_is_the_policy(self, model_dir: Path, tmp_path: Path) -> None:
        items = episodes(6)
        batch = pack(items, first_fit(items, 64), 64)
        learner = self.make(config_of(), model_dir)
        learner.update(batch)
        source = learner.export(ExportToDirectory(tmp_path / "export"))
        assert source == WeightsInDirectory(tmp_path / "export")
        again = self.make(config_of(), tmp_path / "export")
        np.testing.assert_allclose(again.score(batch), learner.score(batch), atol=self.tolerance)
        learner.close()
        again.close()
