"""The JAX sampler under the contract of all samplers, with weights from memory and directories."""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from rljax.backends.jax import hf
from rljax.config.allocation import Pool
from rljax.engine import WeightsInDirectory, WeightsInMemory
from rljax.engines.jax.sampling.sampler import JaxSampler
from rljax.hf.tokenizer import load_tokenizer
from rljax.testing.models import VOCABULARY, config_of, make_model
from rljax.testing.sampler_contract import SamplerContract


@functools.cache
def models() -> tuple[TemporaryDirectory, list[Path]]:
    root = TemporaryDirectory()
    return root, [make_model(Path(root.name) / str(seed), seed=seed) for seed in (0, 1)]


class TestJaxSampler(SamplerContract):
    vocabulary = VOCABULARY
    settings: ClassVar[dict[str, object]] = {}

    def make(self, model):
        return JaxSampler(config_of(**self.settings), Pool("jax"), models()[1][model])

    def source(self, model):
        return WeightsInMemory(hf.load(models()[1][model])[1])

    def text(self, token_ids):
        return load_tokenizer(models()[1][0]).decode(token_ids, skip_special_tokens=False)


class TestJaxSamplerFromDirectories(TestJaxSampler):
    """Reads results one dispatch later (as on a device), recomputes keys and values, lends memory.

    Weights come from files.
    """

    settings: ClassVar[dict[str, object]] = {"rollout.recompute_kv_on_publish": True, "jax.release_memory": True}

    def make(self, model):
        return JaxSampler(config_of(**self.settings), Pool("jax"), models()[1][model], ahead=1)

    def source(self, model):
        return WeightsInDirectory(models()[1][model])
