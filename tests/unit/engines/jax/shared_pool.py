"""Run in a process of its own with 8 forced host devices: a sampler and a learner at work on the
same devices at once.

python -m tests.unit.engines.jax.shared_pool DIRECTORY f2 STEPS
"""

import asyncio
import itertools
import sys
from pathlib import Path

import numpy as np

from rljax.engine import Engine, ExportToSampler
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.engines.jax.sampling.sampler import JaxSampler
from rljax.testing import models
from rljax.testing.learner_batches import config_of, episodes, first_fit, pack
from rljax.types import Request, SamplingParams
from tests.unit.engines.jax.learning.sharded_learner import pool


async def work(directory: Path, mesh: str, steps: int) -> None:
    config = config_of(**{"jax.slots": 8, "actor.mb_spec.rows_per_mb": 1})
    shared = pool(mesh)
    learner, sampler = JaxLearner(config, shared, directory), JaxSampler(config, shared, directory)
    engine = Engine(sampler, learner, ExportToSampler("memory", shared), directory / "publish")
    items = episodes(24)
    batch = pack(items, first_fit(items, 64), 64)
    numbers, over = itertools.count(), asyncio.Event()
    params = SamplingParams(16)

    async def generate() -> int:
        done = 0
        while not over.is_set():
            number = next(numbers)
            await sampler.generate(Request(str(number), np.arange(3, 8 + number % 20, dtype=np.int32), params, number))
            done += 1
        return done

    async def learn() -> None:
        for version in range(1, steps + 1):
            scored = await asyncio.to_thread(learner.score, batch)
            await asyncio.to_thread(learner.update, batch.replace(proximal_logp=scored))
            await engine.publish(version)
        over.set()

    *completions, _ = await asyncio.gather(*(generate() for _ in range(8)), learn())
    print(f"{sum(completions)} completions beside {steps} steps")
    await engine.close()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    asyncio.run(work(models.make_model(path), sys.argv[2], int(sys.argv[3])))
