"""What an engine is: the protocols of samplers, learners and the plugins that make them.

The loop they serve, in outline (`rljax/loop.py` is the real one):

    engine = build(config, allocation, model_dir, workdir)
    completion = await engine.sampler.generate(request)       # any number at once
    ...
    proximal_logp = engine.learner.score(batch)
    metrics = engine.learner.update(batch)                    # one optimizer step
    await engine.publish(version + 1)                         # in-flight requests go on under the new weights
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rljax.batching.batch import Batch
from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config, EngineConfig
from rljax.engine.rank import ProcessRank
from rljax.metrics.mean import Mean
from rljax.types import Completion, Piece, Request


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
    config_class: type[EngineConfig] | None  # its section of the config, below its own name; None: it has no settings

    def check(self, config: Config, allocation: Allocation) -> None:
        """Raises UserError for a setting that this engine, in the roles it has there, can't do; before anything starts."""
        ...

    def context_length(self, config: Config) -> int | None:
        """Longest prompt and completion that its sampler has room for, tokens; None where it sets no limit of its own."""
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
    """A plugin whose learner lives in several processes (rljax/multiprocess). Optional: another's lives in the run's process.

    Every process makes the learner and makes the same calls in the same order, with the same whole batch; each takes its own
    rows of it, what a call returns is whole everywhere, and rank 0 alone writes exports. `make_learner` finds its rank in the
    environment, by torchrun's names and RLJAX_COORDINATOR, a HOST:PORT that is free on rank 0's host.
    """

    def processes(self, config: Config, pool: Pool) -> int | None:
        """That the pool's learner takes; None: as many as a launcher started, one without a launcher."""
        ...

    def process(self, config: Config, pool: Pool) -> ProcessRank | None:
        """Where the machine itself says which process this is (a framework's runtime may be joined); None: the environment."""
        ...


State = Mapping[str, Mapping[str, np.ndarray]]  # of a learner, in no framework's terms (rljax/checkpoints/portable.py)


@runtime_checkable
class PortablePlugin(Plugin, Protocol):
    """A plugin whose learner's checkpoints other engines' learners can go on from. Optional: of others, only its own can."""

    formats: tuple[str, ...]  # that meta.json of its learner's checkpoints may name

    def read_checkpoint(self, directory: Path) -> State:
        """What its learner saved there, with no such learner made. Raises UserError where it is corrupt or can't be read."""
        ...
