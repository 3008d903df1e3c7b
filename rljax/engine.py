"""The engine interface: what samples, what learns, and how weights get from one to the other.

The loop it serves, in outline (`rljax/loop.py` is the real one):

    engine = build(config, allocation, model_dir, workdir)
    completion = await engine.sampler.generate(request)       # any number at once
    ...
    proximal_logp = engine.learner.score(batch)
    metrics = engine.learner.update(batch)                    # one optimizer step
    await engine.publish(version + 1)                         # in-flight requests go on under the new weights

A third party plugs in by an entry point of the group `rljax.engines` whose name is the engine's word in
`allocation_mode` and whose object is a `Plugin`; the contract suite in tests/contract says what it must do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import shutil
import tempfile
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from rljax.allocation import Allocation, Pool, parse
from rljax.batch import Batch
from rljax.config import Config
from rljax.errors import SamplerError, UserError
from rljax.metrics import Mean
from rljax.types import Completion, Piece, Request

if TYPE_CHECKING:
    from rljax.ranks import Place

GROUP = "rljax.engines"  # of entry points
ATTACHED = "http"  # the engine of servers that run already

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Where a sampler finds weights: arrays in this process, or a directory of HF safetensors.

    Example: WeightSource(directory=Path("/dev/shm/rljax/17"))
    """

    params: Any = None  # a pytree of the learner's framework, in its layout; the sampler reshards it
    directory: Path | None = None


class Sampler(Protocol):
    """Generates completions. `generate` may be called any number of times at once, from the event loop."""

    @property
    def version(self) -> int:
        """Of the weights it samples from now."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Token ids in; token ids, log-probs and a version a token out. Raises SamplerError when the request is lost."""
        ...

    async def pause(self) -> None:
        """Returns once no decode step is running; requests in flight keep their state."""
        ...

    async def resume(self) -> None: ...

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """Swaps weights in place. No cache computed with older weights serves a request that starts later."""
        ...

    async def close(self) -> None:
        """Ends every request in flight with finish `abort` and frees what the sampler holds."""
        ...


@runtime_checkable
class StreamingSampler(Sampler, Protocol):
    """A sampler that also hands out completions as they grow. Optional: a server before one that can't sends one piece."""

    def stream(self, request: Request) -> AsyncIterator[Piece]:
        """The completion of `generate`, piece by piece. Closing the iterator before its last piece aborts the request."""
        ...


@runtime_checkable
class RecoveringSampler(Protocol):
    """A sampler whose parts die and come back without weights. Optional."""

    async def lacks_weights(self) -> None:
        """Returns when a part is back that waits for weights which only a publish can bring."""
        ...


@runtime_checkable
class LendingSampler(Protocol):
    """A sampler that can lend its memory to a learner on the same devices. Optional."""

    @property
    def lends(self) -> bool:
        """Whether the config wants it to."""
        ...

    async def release(self) -> None:
        """Lets go of weights and caches until `reclaim`. What is in flight ends with finish `abort`, or waits."""
        ...

    async def reclaim(self) -> None:
        """Has its memory again. Nothing is generated before `load_weights` has filled it, and `resume`."""
        ...


class Learner(Protocol):
    """Trains one policy (and a critic where the algorithm has one). Methods block; the loop calls them from a thread."""

    def score(self, batch: Batch) -> np.ndarray:
        """Log-probs of the tokens under the current policy. [R, T] float32, nats; 0 where loss_mask is False."""
        ...

    def score_reference(self, batch: Batch) -> np.ndarray:
        """The same under the frozen reference policy. Only with kl_ctl > 0."""
        ...

    def values(self, batch: Batch) -> np.ndarray:
        """Critic's value at each token. [R, T] float32, reward units. Only with adv_estimator "gae"."""
        ...

    def update(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the policy on all rows of the batch (and nothing of the critic)."""
        ...

    def update_critic(self, batch: Batch) -> dict[str, Mean]:
        """One optimizer step of the critic."""
        ...

    def update_supervised(self, batch: Batch) -> dict[str, Mean]:
        """One step of negative log-likelihood weighted by loss_weight, with the warm-up optimizer (the policy's for "sft")."""
        ...

    def export(self, directory: Path | None) -> WeightSource:
        """Weights for a sampler: in memory when directory is None, else HF safetensors, config and tokenizer there."""
        ...

    def save(self, directory: Path) -> None:
        """Writes parameters, optimizer moments and step under directory, which does not exist yet."""
        ...

    def restore(self, directory: Path) -> None:
        """Raises UserError on a missing, foreign or corrupt checkpoint, leaving the learner as it was."""
        ...

    def close(self) -> None: ...


class Plugin(Protocol):
    """What an entry point of `rljax.engines` resolves to. Constructors block; they may compile."""

    dims: str  # letters of `allocation_mode` it can do, of "dtpcef"
    samples: bool  # it has a sampler
    learns: bool  # it has a learner
    transports: tuple[str, ...]  # ways it can take or give weights, best first: "memory", "nccl", "ipc", "directory"

    def check(self, config: Config, allocation: Allocation) -> None:
        """Raises UserError for a setting that this engine, in the roles it has there, can't do; before anything starts."""
        ...

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        """Raises UserError where samples is False."""
        ...

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> Learner:
        """Raises UserError where learns is False."""
        ...


@runtime_checkable
class RoutedPlugin(Plugin, Protocol):
    """A plugin whose transports depend on the config. Optional: of others, all in `transports` are open."""

    def routes(self, config: Config, allocation: Allocation) -> tuple[str, ...]:
        """Those of `transports` that can be used there, best first. Raises UserError where the config wants another."""
        ...


@runtime_checkable
class HostPlugin(Plugin, Protocol):
    """A plugin whose sampler may do without accelerators. Optional."""

    def on_host(self, config: Config) -> bool:
        """Whether its pool takes none of the devices that `allocation_mode` counts."""
        ...


@runtime_checkable
class ManyProcesses(Protocol):
    """A plugin whose learner lives in several processes (rljax/ranks). Optional: the learner of another one lives in the run's.

    Every process makes the learner and makes the same calls in the same order, with the same whole batch; each takes its own
    rows of it, what a call returns is whole everywhere, and rank 0 alone writes exports. `make_learner` finds its rank in the
    environment, by torchrun's names and RLJAX_COORDINATOR, a HOST:PORT that is free on rank 0's host.
    """

    def processes(self, config: Config, pool: Pool) -> int | None:
        """That the pool's learner takes; None: as many as a launcher started, one without a launcher."""
        ...

    def place(self, config: Config, pool: Pool) -> Place | None:
        """Where the machine itself says which process this is (a framework's runtime may be joined); None: the environment."""
        ...


State = Mapping[str, Mapping[str, np.ndarray]]  # of a learner, in no framework's terms (rljax/portable.py)


@runtime_checkable
class PortablePlugin(Plugin, Protocol):
    """A plugin whose learner's checkpoints other engines' learners can go on from. Optional: of others, only its own can."""

    formats: tuple[str, ...]  # that meta.json of its learner's checkpoints may name

    def read_checkpoint(self, directory: Path) -> State:
        """What its learner saved there, with no such learner made. Raises UserError where it is corrupt or can't be read."""
        ...


@dataclasses.dataclass
class Engine:
    """A sampler, a learner, and the way weights get from one to the other."""

    sampler: Sampler
    learner: Learner
    transport: str
    publish_dir: Path  # for transport "directory"; in memory-backed storage where there is some

    async def publish(self, version: int) -> None:
        """Learner weights become the sampler's. Requests in flight pause between two decode steps, then go on.

        Where a part of the sampler dies of it, or while it takes weights from memory, they are published through a directory,
        which those that come back can read later. In between it stays paused, and where that fails too it does so for good.
        """
        source = await self._export(version, through_directory=self.transport == "directory")
        await self.sampler.pause()
        whole = True  # no part of the sampler has some new and some old weights
        try:
            try:
                await self.sampler.load_weights(source, version)
            except SamplerError as error:
                if source.directory is not None:
                    raise
                log.warning("publishing by %s failed, and is done through a directory: %s", self.transport, error)
                whole = False
                source = await self._export(version, through_directory=True)
                await self.sampler.load_weights(source, version)
                whole = True
        finally:
            if whole:
                await self.sampler.resume()
        if source.directory is not None:
            await asyncio.to_thread(shutil.rmtree, source.directory)

    async def _export(self, version: int, *, through_directory: bool) -> WeightSource:
        if not through_directory:
            return await asyncio.to_thread(self.learner.export, None)
        self.publish_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return await asyncio.to_thread(self.learner.export, self.publish_dir / str(version))

    @contextlib.asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """Around an update: a sampler on the same devices lends its memory, where the config wants it. A publish comes next."""
        sampler = self.sampler
        if not (isinstance(sampler, LendingSampler) and sampler.lends):
            yield
            return
        await sampler.release()
        try:
            yield
        finally:
            await sampler.reclaim()

    async def lacks_weights(self) -> None:
        """Returns when a part of the sampler waits for a publish; never, where that can't happen."""
        if isinstance(self.sampler, RecoveringSampler):
            await self.sampler.lacks_weights()
        else:
            await asyncio.Event().wait()

    async def close(self) -> None:
        """Ends both sides and leaves no published weights behind."""
        await self.sampler.close()
        await asyncio.to_thread(self.learner.close)
        await asyncio.to_thread(shutil.rmtree, self.publish_dir, ignore_errors=True)


def allocate(config: Config) -> Allocation:
    """The pools of `allocation_mode`; with `rollout.addr` the sampler is the servers there, whatever the mode says.

    A learner behind a sampler that takes no devices of this machine has them from the first.

    Raises UserError for a mode that can't be read or done.
    """
    allocation = parse(config.allocation_mode, find_plugin)
    if config.rollout.addr:
        allocation = dataclasses.replace(allocation, sampler=Pool(ATTACHED))
    elif not _on_host(config, allocation.sampler):
        return allocation
    learner = allocation.learner and dataclasses.replace(allocation.learner, first_device=0)
    return dataclasses.replace(allocation, learner=learner)


def _on_host(config: Config, pool: Pool | None) -> bool:
    if pool is None:
        return False
    plugin = find_plugin(pool.engine)
    return isinstance(plugin, HostPlugin) and plugin.on_host(config)


def check(config: Config, allocation: Allocation) -> None:
    """Asks each engine of the allocation whether it can do what the config wants. Raises UserError; starts nothing."""
    # In one order, so that the same config has the same message; a sampler may have to ask another interpreter.
    for name in dict.fromkeys(pool.engine for pool in (allocation.learner, allocation.sampler) if pool):
        find_plugin(name).check(config, allocation)


def require_both(allocation: Allocation) -> tuple[Pool, Pool]:
    """Its sampler and its learner. Raises UserError where it has but one."""
    if allocation.sampler is None or allocation.learner is None:
        learns = allocation.sampler is None
        alone, both = ("learns", f"SAMPLER:d1+{allocation}") if learns else ("samples", f"{allocation}+LEARNER:d1")
        raise UserError(
            f"allocation_mode: {allocation} only {alone}; training needs both, as in {both}"
            f" (with actor.loss=sft too: evaluation samples)"
        )
    return allocation.sampler, allocation.learner


def make_learner(config: Config, pool: Pool, model_dir: Path) -> Learner:
    """The pool's learner, or this process's part of it. Blocks; may compile."""
    return find_plugin(pool.engine).make_learner(config, pool, model_dir)


def build(
    config: Config,
    allocation: Allocation,
    model_dir: Path,
    workdir: Path,
    make_learner: Callable[[Config, Pool, Path], Learner] = make_learner,
) -> Engine:
    """Makes a sampler and a learner from the same model directory. Blocks; both may compile.

    Args:
      workdir: of the run, which this process has for itself; weights are published through a directory named after it.
      make_learner: that of a `Team`, where the learner may live in several processes (rljax/ranks).

    Raises:
      UserError: when the allocation lacks one of them, or no transport leads from one to the other.
    """
    samples, learns = require_both(allocation)
    transport = transport_of(config, allocation)
    learner = make_learner(config, learns, model_dir)
    sampler = find_plugin(samples.engine).make_sampler(config, samples, model_dir)
    return Engine(sampler, learner, transport, scratch(workdir))


def check_lending(config: Config, allocation: Allocation, key: str) -> None:
    """Whether a sampler can lend its memory: to a learner on its devices, in a run that samples or learns. Raises UserError."""
    sampler, learner = allocation.sampler, allocation.learner
    if sampler is None or learner is None or sampler.first_device != learner.first_device:
        raise UserError(f"{key}: is for engines on the same devices (allocation_mode with '|', or one pool)")
    if config.rollout.max_head_offpolicyness:
        raise UserError(f"{key}: is for synchronous runs (rollout.max_head_offpolicyness=0): others sample while they update")


def transport_of(config: Config, allocation: Allocation) -> str:
    """The sampler's best way that the learner has too; arrays in memory are of one engine's own layout.

    Raises UserError where there is none, or only half an engine.
    """
    if allocation.sampler is None or allocation.learner is None:
        raise UserError(f"allocation_mode: {allocation} publishes no weights (a sampler and a learner do)")
    sampler, learner = allocation.sampler.engine, allocation.learner.engine
    taken, given = (_routes(find_plugin(name), config, allocation) for name in (sampler, learner))
    for way in taken:
        if way in given and (way != "memory" or sampler == learner):
            return way
    raise UserError(
        f"allocation_mode: no way for weights from {learner} ({', '.join(given)}) to {sampler} ({', '.join(taken)})"
    )


def _routes(plugin: Plugin, config: Config, allocation: Allocation) -> tuple[str, ...]:
    return plugin.routes(config, allocation) if isinstance(plugin, RoutedPlugin) else plugin.transports


def scratch(workdir: Path, what: str = "") -> Path:
    """Where weights go on their way, in memory where Linux has a directory there. It is the same for every process of a run:
    what a killed one left is deleted. Not made yet."""
    name = "rljax-" + hashlib.blake2b(str(workdir.resolve()).encode(), digest_size=8).hexdigest() + what
    directory = memory_backed() / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def memory_backed() -> Path:
    """A directory whose files are in memory, where Linux has one."""
    return Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def find_plugin(name: str) -> Plugin:
    """The engine registered under a name. Raises UserError for an unknown name, or one registered twice."""
    found = [point for point in _entry_points() if point.name == name]
    if not found:
        known = ", ".join(sorted({point.name for point in _entry_points()}))
        raise UserError(f"allocation_mode: no engine named {name!r} (installed: {known})")
    if len({point.value for point in found}) > 1:
        raise UserError(f"allocation_mode: the engine name {name!r} is registered twice: {', '.join(p.value for p in found)}")
    return found[0].load()


def portable_plugin(form: str) -> PortablePlugin | None:
    """The installed engine that reads checkpoints of a format, or None."""
    for name in sorted({point.name for point in _entry_points()}):
        try:
            plugin = find_plugin(name)
        except (ImportError, UserError) as error:  # another engine's trouble is not this checkpoint's
            log.warning("the engine %s is passed over: %s", name, error)
            continue
        if isinstance(plugin, PortablePlugin) and form in plugin.formats:
            return plugin
    return None


def _entry_points() -> list[metadata.EntryPoint]:
    """Installed entry points; a checkout that is run without an install brings its own from pyproject.toml."""
    installed = list(metadata.entry_points(group=GROUP))
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if pyproject.is_file():
        own = tomllib.loads(pyproject.read_text())["project"]["entry-points"][GROUP]
        installed += [metadata.EntryPoint(name, value, GROUP) for name, value in own.items()]
    return installed
