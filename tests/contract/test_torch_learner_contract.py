"""The PyTorch learner under the contracts of all learners: one process on the CPU."""

from rljax.config.allocation import Pool
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.testing.distillation_contract import DistillationContract
from rljax.testing.learner_contract import LearnerContract


class Made:
    def make(self, config, model_dir):
        return TorchLearner(config, Pool("fsdp"), model_dir)


class TestTorchLearner(Made, LearnerContract):
    pass


class TestTorchDistillation(Made, DistillationContract):
    pass
