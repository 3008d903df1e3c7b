"""A process that serves the fake engine's table: `python serve_fake.py MODEL_DIR PORT DELAY`.

It begins at version 0.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from rljax.engines.fake.sampler import FakeSampler, Trouble
from rljax.engines.http.server import SamplerServer, ServerOptions
from rljax.testing.harness import make_config


async def main(model_dir: Path, port: int, delay: float) -> None:
    sampler = FakeSampler(make_config(), model_dir, Trouble(np.random.default_rng(port), delay=delay))
    server = SamplerServer(sampler, ServerOptions(str(model_dir), [model_dir.parent]))
    await server.start("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
