"""The PyTorch learner under the contract of all learners: one process on the CPU."""

from rljax.config.allocation import Pool
from rljax.engines.cuda.learner import TorchLearner
from rljax.testing.learner_contract import LearnerContract


class TestTorchLearner(LearnerContract):
    def make(self, config, model_dir):
        return TorchLearner(config, Pool("fsdp"), model_dir)
