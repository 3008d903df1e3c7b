"""The JAX learner under the contract of all learners."""

from rljax.config.allocation import Pool
from rljax.engines.jax.learner import JaxLearner
from rljax.testing.learner_contract import LearnerContract


class TestJaxLearner(LearnerContract):
    def make(self, config, model_dir):
        return JaxLearner(config, Pool("jax"), model_dir)
