"""The fake sampler under the contract of all samplers, apart from what a bigram table can't do."""

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np

from rljax.engine import WeightsInDirectory
from rljax.engines.fake import model
from rljax.engines.fake.sampler import FakeSampler, Trouble
from rljax.testing.models import VOCABULARY, config_of
from rljax.testing.sampler_contract import SamplerContract


@functools.cache
def models() -> tuple[TemporaryDirectory, list[Path]]:
    root = TemporaryDirectory()
    directories = [Path(root.name) / str(seed) for seed in (0, 1)]
    for seed, directory in enumerate(directories):
        model.write(directory, np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32))
    return root, directories


class TestFakeSampler(SamplerContract):
    vocabulary = VOCABULARY
    without: ClassVar[frozenset[str]] = frozenset({"top", "stop strings", "context"})

    def make(self, which):
        async def made():  # its events belong to the loop
            return FakeSampler(config_of(), models()[1][which], Trouble(np.random.default_rng(0), delay=1e-3))

        return self._loop.run(made())

    def source(self, which):
        return WeightsInDirectory(models()[1][which])
