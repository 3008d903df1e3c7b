"""The process beside the trainer in the soak: a sampling server, or a rollout worker.

It runs until it is killed. A worker with an odd SEED has a sampler of its own.

    python -m tests.soak.partner server WORKDIR PORT SEED
    python -m tests.soak.partner worker WORKDIR PORT SEED
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from rljax.engines.fake import model
from rljax.engines.fake.sampler import FakeSampler, Trouble
from rljax.engines.http.server import SamplerServer, ServerOptions
from rljax.errors import UserError
from rljax.testing.harness import VOCAB, make_config, worker


async def serve(workdir: Path, port: int, trouble: Trouble) -> None:
    directory = workdir / f"server-{port}"
    model.make_model(directory, VOCAB)
    sampler = FakeSampler(make_config(), directory, trouble)
    options = ServerOptions(model_path=str(directory), weight_roots=[workdir, Path("/dev/shm"), Path("/tmp")])
    await SamplerServer(sampler, options).start("127.0.0.1", port)
    await asyncio.Event().wait()


async def work(workdir: Path, port: int, seed: int, trouble: Trouble) -> None:
    while True:  # a run that ends is followed by the next
        try:
            await worker(workdir, address=f"127.0.0.1:{port}", own_sampler=seed % 2 == 1, trouble=trouble, patience=600.0)
        except UserError as error:
            print(error, file=sys.stderr)
        await asyncio.sleep(0.1)


def main() -> None:
    kind, workdir, port, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    trouble = Trouble(np.random.default_rng(seed), delay=0.004, failure_rate=0.002 if kind == "server" else 0.1)
    asyncio.run(serve(workdir, port, trouble) if kind == "server" else work(workdir, port, seed, trouble))


if __name__ == "__main__":
    main()
