"""The buffer: put and take of 25 KB groups per second, in one process and from others.

    python -m experiments.bench.buffer

One measurement also writes every group to the journal, to show its share.
"""

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.configs import base
from rljax.engine import Generator
from rljax.experiments import main
from rljax.metrics.accumulator import Accumulator
from rljax.rollout.buffer import Buffer, Limits, Ticket
from rljax.rollout.journal import Journals
from rljax.rollout.producer import GroupRunner
from rljax.rollout.result import Result
from rljax.rollout.tracker import PromptTracker
from rljax.types import Finish, Group, Prompt, SamplingParams, Trajectory
from rljax.workers.client import TrainerGenerator, WorkerParts, work
from rljax.workers.server import Job, WorkerServer

ITEMS, BATCH, TOKENS = 20_000, 64, 1923  # 13 bytes a token: 25 KB


class Endless:
    """Prompts without content."""

    def __init__(self) -> None:
        self._position = 0

    def __next__(self) -> Prompt:
        self._position += 1
        return Prompt(f"0/{self._position}", (), {})

    def __len__(self) -> int:
        return ITEMS

    def state(self) -> dict[str, int]:
        return {"position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def _group(version: int) -> Group:
    mask = np.arange(TOKENS) >= 200
    versions = np.where(mask, version, -1).astype(np.int32)
    ids, logp = np.zeros(TOKENS, np.int32), np.zeros(TOKENS, np.float32)
    return Group("0/0", (Trajectory(ids, mask, logp, versions, 1.0, {}, Finish.STOP),))


def _through(groups: list[Group], journals: Journals | None) -> float:
    """Returns the seconds to admit, finish and take all items, publishing after each batch."""
    buffer = Buffer(Endless(), Limits(2, BATCH, 3 * BATCH, None, None))
    start = time.perf_counter()
    for batch in range(0, ITEMS, BATCH):
        for group in groups[batch : batch + BATCH]:
            ticket = buffer.admit()
            assert ticket is not None
            if journals is not None:
                journals.append(ticket, group, accepted=True)
            buffer.finish(ticket, group)
        if buffer.take() is not None:
            buffer.publish()
    return time.perf_counter() - start


class Ready(GroupRunner):
    """A worker's groups without the work: always the same."""

    async def run(self, ticket: Ticket) -> Result:
        return Result(_group(0).trajectories, (), wanted=True)


@contextlib.asynccontextmanager
async def _parts(config: Config, tokenizer_dir: Path, model: Path | None, remote: Generator) -> AsyncIterator[WorkerParts]:
    class Nothing:
        async def episode(self, generator: Generator, prompt: Prompt, params: SamplingParams, seed: int) -> None:
            return None

    yield WorkerParts(Ready(Nothing(), remote, SamplingParams(1), 1, 0, lambda group: True))


def _worker(address: str) -> None:
    asyncio.run(work(lambda: (address, "token"), _parts))


async def _by_workers(workers: int, directory: Path) -> tuple[float, float]:
    """Returns seconds, and this process's CPU seconds, to lease, receive and take all items.

    The workers themselves need no time.
    """
    limits = Limits(10**9, BATCH, 8 * BATCH, None, ITEMS)
    buffer, journals, accumulator = Buffer(Endless(), limits), Journals(directory), Accumulator()
    config = config_io.resolve(config_io.from_dict(base.get_config()))
    tracker = PromptTracker(
        config, buffer=buffer, journals=journals, recovered={}, accumulator=accumulator, beat=lambda what: None
    )
    server = WorkerServer(
        config, directory, token="token", scratch=directory / "scratch", address_file=directory / "workers.json"
    )
    address = await server.open()

    async def export(directory: Path) -> int:
        raise AssertionError("no worker here has a sampler of its own")

    processes = [multiprocessing.get_context("spawn").Process(target=_worker, args=(address,)) for _ in range(workers)]
    for process in processes:
        process.start()
    while server.take_metrics()["rollout/workers"].value < workers:
        await asyncio.sleep(0.01)
    nobody = TrainerGenerator(None)  # type: ignore[arg-type]
    start, computing = time.perf_counter(), time.process_time()
    serving = asyncio.create_task(server.run(Job(buffer, tracker, nobody, accumulator, export)))
    taken = 0
    while taken < ITEMS:
        change = buffer.change()
        if (entries := buffer.take()) is not None:
            taken += len(entries)
            buffer.publish()
        else:
            await asyncio.wait([serving, change], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    seconds, computing = time.perf_counter() - start, time.process_time() - computing
    serving.cancel()
    await server.close()
    for process in processes:
        process.join()
    return seconds, computing


def bench() -> None:
    groups = [_group(i // BATCH) for i in range(ITEMS)]
    size = sum(getattr(groups[0].trajectories[0], n).nbytes for n in ("token_ids", "loss_mask", "behavior_logp", "versions"))
    seconds = [_through(groups, None) for _ in range(5)]
    print(f"put + take of {size / 1e3:.1f} KB: {ITEMS / np.median(seconds):,.0f} a second (best {ITEMS / min(seconds):,.0f})")
    with tempfile.TemporaryDirectory() as directory:
        journals = Journals(Path(directory))
        journals.begin(0, ITEMS)
        took = _through(groups, journals)
        journals.close()
    print(f"the same, every group journaled to {tempfile.gettempdir()}: {ITEMS / took:,.0f} a second")
    for workers in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            took, computing = asyncio.run(_by_workers(workers, Path(directory)))
        name = f"{workers} other process{'es' if workers > 1 else ''}"
        print(f"leased to, and put by, {name}: {ITEMS / took:,.0f} a second, {computing / ITEMS * 1e6:.0f} us of CPU here each")


if __name__ == "__main__":
    main.run_main(bench)
