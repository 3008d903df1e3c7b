"""The entry point `fake`."""

from __future__ import annotations

from pathlib import Path

from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import Plugin, find_plugin
from rljax.engine.rank import from_environment
from rljax.engines.fake.collective import Alone, Collective
from rljax.engines.fake.learner import FakeLearner
from rljax.engines.fake.sampler import FakeSampler
from rljax.errors import UserError


class FakePlugin(Plugin):
    """Plugin of the fake engine. It uses no device; the learner of `fake:d3` has three processes."""

    samples = True
    learns = True
    transports = ("memory", "directory")

    def check(self, config: Config, allocation: Allocation) -> None:
        """Refuses top_p, top_k and stop strings: the sampler draws from the whole distribution."""
        if allocation.sampler is None or not isinstance(find_plugin(allocation.sampler.engine), FakePlugin):
            return
        drawn = (config.gconfig, config.evaluator)
        if config.gconfig.stop or any(params.top_p < 1 or params.top_k > 0 for params in drawn):
            raise UserError("allocation_mode: the engine fake has no top_p, top_k or stop strings (leave them out of gconfig)")

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> FakeSampler:
        return FakeSampler(config, model_dir)

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> FakeLearner:
        process = from_environment()
        return FakeLearner(config, model_dir, Collective(process) if process.size > 1 else Alone())

    def processes(self, config: Config, pool: Pool) -> int:
        return pool.data


PLUGIN = FakePlugin()
