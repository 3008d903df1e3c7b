"""The engine `bigram` under the contract of all samplers: pytest test_rljax_bigram.py"""

from typing import ClassVar

import numpy as np
import pytest
from rljax_bigram import BigramSampler
from safetensors.numpy import save_file

from rljax.engine import WeightsInDirectory
from rljax.testing.models import config_of
from rljax.testing.sampler_contract import SamplerContract


class TestBigramSampler(SamplerContract):
    without: ClassVar = frozenset({"top", "stop strings", "context"})

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _models(cls, tmp_path_factory):
        cls.models = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
        for seed, directory in enumerate(cls.models):
            table = np.random.default_rng(seed).normal(size=(cls.vocabulary, cls.vocabulary))
            save_file({"table": table.astype(np.float32)}, directory / "bigram.safetensors")
            (directory / "config.json").write_text(f'{{"vocab_size": {cls.vocabulary}}}')

    def make(self, model):
        return BigramSampler(config_of(), self.models[model])

    def source(self, model):
        return WeightsInDirectory(self.models[model])
