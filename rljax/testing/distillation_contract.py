"""Required behavior of every learner with a teacher (`actor.distill`).

Subclass `DistillationContract` and say how a learner is made. Expectations are derived: the
teacher's own log-probs, the whole vocabulary in place of samples, a save in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rljax.batching.batch import Batch
from rljax.config.schema import Config
from rljax.engine import Learner
from rljax.errors import UserError
from rljax.testing import models
from rljax.testing.learner_batches import UPDATE, Episode, config_of, episodes, first_fit, pack
from rljax.testing.models import VOCABULARY
from rljax.types import PROMPT_VERSION

KEY = "actor.distill.teacher"
ADAPTERS = {"actor.lora.rank": 4, "actor.lora.alpha": 8.0}  # adapters learn less in as many steps than all parameters


class DistillationContract:
    """Subclass it as `Test...`; set `tolerance` to what float32 gives on the device."""

    tolerance = 2e-5  # absolute, float32 log-probs

    def make(self, config: Config, model_dir: Path) -> Learner:
        raise NotImplementedError("subclasses say how a learner is made")

    def make_teacher(self, directory: Path) -> Path:
        """Makes a model directory of the same vocabulary, with another shape and other weights."""
        return models.make_model(directory, seed=1, num_layers=3, hidden_size=48, initializer_range=0.3)

    @pytest.fixture(scope="class")
    @classmethod
    def model_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return models.make_model(tmp_path_factory.mktemp("model"))

    def test_without_a_teacher_scoring_with_it_is_refused_by_its_key(self, model_dir: Path) -> None:
        learner = self.make(config_of(), model_dir)
        with pytest.raises(UserError, match=rf"^{KEY}: "):
            learner.score_teacher(pack(episodes(2), [[0], [1]], 32))
        learner.close()

    def test_the_teacher_is_the_model_of_its_directory(self, model_dir: Path, tmp_path: Path) -> None:
        directory = self.make_teacher(tmp_path / "teacher")
        config = config_of(**{KEY: str(directory), "gconfig.temperature": 0.7})
        learner, teacher = self.make(config, model_dir), self.make(config_of(**{"gconfig.temperature": 0.7}), directory)
        items = episodes(6)
        batch = pack(items, first_fit(items, 64), 64)
        want, own = teacher.score(batch), learner.score(batch)
        np.testing.assert_allclose(learner.score_teacher(batch), want, atol=self.tolerance)
        means = learner.update(batch.replace(teacher_logp=want))
        expected = (own - want)[batch.loss_mask].astype(np.float64).mean()
        assert means[f"{UPDATE}/teacher_kl"].value == pytest.approx(expected, rel=1e-4)
        np.testing.assert_allclose(learner.score_teacher(batch), want, atol=self.tolerance)  # the step left the teacher alone
        assert np.abs(learner.score(batch) - own).max() > 1e-3
        learner.close()
        teacher.close()

    @pytest.mark.parametrize(("settings", "share"), [({}, 0.8), (ADAPTERS, 0.95)], ids=["all parameters", "adapters"])
    def test_distillation_lowers_the_reverse_kl_to_the_teacher(
        self, model_dir: Path, tmp_path: Path, settings: dict[str, Any], share: float
    ) -> None:
        """The expectation over samples sums over the vocabulary, by the student's probabilities."""
        directory = self.make_teacher(tmp_path / "teacher")
        config = config_of(**{KEY: str(directory), "actor.optimizer.weight_decay": 0.0} | settings)
        learner = self.make(config, model_dir)
        batch = _every_token_after([5, 40])
        batch = batch.replace(teacher_logp=learner.score_teacher(batch))
        history = []
        for _ in range(8):
            logp = learner.score(batch)
            weight = np.where(batch.loss_mask, np.exp(logp), 0).astype(np.float32)
            history.append(float((weight * (logp - batch.teacher_logp)).sum()))
            assert weight.sum() == pytest.approx(1, rel=1e-4)
            learner.update(batch.replace(loss_weight=weight, behavior_logp=logp))
        assert history == sorted(history, reverse=True)
        assert 0 < history[-1] < share * history[0]
        learner.close()

    def test_a_run_that_has_a_teacher_goes_on_with_it_and_none_is_saved(self, model_dir: Path, tmp_path: Path) -> None:
        directory = self.make_teacher(tmp_path / "teacher")
        config = config_of(**{KEY: str(directory)})
        items = episodes(6)
        batch = pack(items, first_fit(items, 64), 64)
        learner, plain = self.make(config, model_dir), self.make(config_of(), model_dir)
        teacher_logp = learner.score_teacher(batch)
        learner.update(batch.replace(teacher_logp=teacher_logp))
        learner.save(tmp_path / "checkpoint")
        plain.restore(tmp_path / "checkpoint")  # one without a teacher takes it
        np.testing.assert_allclose(plain.score(batch), learner.score(batch), atol=self.tolerance)
        plain.close()
        resumed = self.make(config, model_dir)
        resumed.restore(tmp_path / "checkpoint")
        np.testing.assert_allclose(resumed.score_teacher(batch), teacher_logp, atol=self.tolerance)
        resumed.close()
        learner.close()


def _every_token_after(prompt: Sequence[int]) -> Batch:
    """Makes a batch with each token of the vocabulary after the prompt; only that token is trained."""
    items = []
    for token in range(VOCABULARY):
        token_ids = np.array([*prompt, token], np.int32)
        mask = np.arange(len(token_ids)) == len(prompt)
        zeros = np.zeros(len(token_ids), np.float32)
        versions = np.where(mask, 0, PROMPT_VERSION).astype(np.int32)
        names = ("loss_weight", "behavior_logp", "advantage")
        items.append(Episode(dict(token_ids=token_ids, loss_mask=mask, versions=versions) | dict.fromkeys(names, zeros)))
    return pack(items, first_fit(items, 60), 60)
