"""The fake learner under the contracts of all learners."""

import numpy as np

from rljax.engines.fake import model
from rljax.engines.fake.learner import FakeLearner
from rljax.testing.distillation_contract import DistillationContract
from rljax.testing.learner_contract import LearnerContract
from rljax.testing.models import VOCABULARY


class Made:
    def make(self, config, model_dir):
        return FakeLearner(config, model_dir)


class TestFakeLearner(Made, LearnerContract):
    has_schedules = False


class TestFakeDistillation(Made, DistillationContract):
    def make_teacher(self, directory):
        table = np.random.default_rng(1).normal(0, 0.5, (VOCABULARY, VOCABULARY))
        model.write(directory, table.astype(np.float32))
        return directory
