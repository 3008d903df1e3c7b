"""The fake learner under the contract of all learners."""

from rljax.engines.fake.learner import FakeLearner
from rljax.testing.learner_contract import LearnerContract


class TestFakeLearner(LearnerContract):
    def make(self, config, model_dir):
        return FakeLearner(config, model_dir)
