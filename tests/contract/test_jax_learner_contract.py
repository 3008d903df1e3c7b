"""The JAX learner under the contracts of all learners."""

from rljax.config.allocation import Pool
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.testing.distillation_contract import DistillationContract
from rljax.testing.learner_contract import LearnerContract


class Made:
    def make(self, config, model_dir):
        return JaxLearner(config, Pool("jax"), model_dir)


class TestJaxLearner(Made, LearnerContract):
    pass


class TestJaxDistillation(Made, DistillationContract):
    pass
