"""The base class of plugins: what an engine can do, and how its sampler and learner are made.
docs/engines.md writes one.
"""

from __future__ import annotations

from pathlib import Path

from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config, EngineConfig
from rljax.engine.interface import Learner, PortableState, Sampler
from rljax.engine.rank import ProcessRank
from rljax.errors import UserError


class Plugin:
    """What an entry point of the group `rljax.engines` resolves to; its name is the engine's word
    in `allocation_mode`.

    Subclass it, set the attributes that differ, and override `make_sampler`, `make_learner` or
    both. A plugin is loaded to be asked: import frameworks where an engine is made, not with the
    module.

    Example:

        class MyPlugin(Plugin):
            samples = True

            def make_sampler(self, config, pool, model_dir):
                return MySampler(model_dir)

        PLUGIN = MyPlugin()      # pyproject.toml: [project.entry-points."rljax.engines"] mine = "my_package:PLUGIN"
    """

    dims: str = "d"
    """Letters of `allocation_mode` that it can do, of "dtpcef"."""

    samples: bool = False
    """Whether it has a sampler."""

    learns: bool = False
    """Whether it has a learner."""

    transports: tuple[str, ...] = ("directory",)
    """Ways it can take or give weights, best first: "memory", "nccl", "ipc", "directory", ..."""

    attaches: bool = False
    """Whether its sampler is made of servers that run already, at `rollout.addr`."""

    formats: tuple[str, ...] = ()
    """Formats in meta.json of its learner's checkpoints that `read_checkpoint` reads."""

    config_class: type[EngineConfig] | None = None
    """Frozen dataclass of the config section that has the engine's name; None for an engine without settings."""

    def check(self, config: Config, allocation: Allocation) -> None:
        """Raises UserError for a setting that the engine, in its roles there, can't do.

        Starts nothing.
        """

    def context_length(self, config: Config) -> int | None:
        """Most tokens of prompt and completion that its sampler has room for; None where it sets
        no limit of its own.
        """
        return None

    def on_host(self, config: Config) -> bool:
        """Whether its sampler takes none of the devices that `allocation_mode` counts."""
        return False

    def routes(self, config: Config, allocation: Allocation) -> tuple[str, ...]:
        """Those of `transports` that can be used there, best first.

        Raises UserError where the config wants another.
        """
        return self.transports

    # Making its parts. These block, and may compile.

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        """Makes the sampler with the weights of model_dir, at version 0.

        Raises UserError where it can't.
        """
        raise UserError(f"allocation_mode: {pool.engine} cannot sample (put a sampler before it: SAMPLER:d1+{pool})")

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> Learner:
        """Makes the learner, or this process's part of it, from model_dir.

        Raises UserError where it can't.
        """
        raise UserError(f"allocation_mode: {pool.engine} cannot learn (put a learner behind it: {pool}+LEARNER:d1)")

    # A learner in several processes (rljax/multiprocess)

    def processes(self, config: Config, pool: Pool) -> int | None:
        """Number of processes the learner needs; None for as many as the launcher started (1
        without one).

        In each of them `make_learner` finds its rank in the environment, by torchrun's names and
        RLJAX_COORDINATOR, a HOST:PORT that is free on rank 0's host. All make the same calls in
        the same order with the same whole batch; each takes its own rows of it, what a call
        returns is whole everywhere, and rank 0 alone writes exports.
        """
        return 1

    def process(self, config: Config, pool: Pool) -> ProcessRank | None:
        """This process's rank where the machine itself says it (a framework's runtime may be
        joined); None: the environment.
        """
        return None

    # Checkpoints that other engines go on from

    def read_checkpoint(self, directory: Path) -> PortableState:
        """Reads what its learner saved there, without making a learner.

        Raises UserError where it is corrupt or can't be.
        """
        raise UserError(f"checkpoint: {directory} can only be read by the engine that wrote it")


def check_lending(config: Config, allocation: Allocation, key: str) -> None:
    """Raises UserError unless a sampler can lend its memory: to a learner on its devices, in a
    synchronous run.

    For a plugin's `check`.

    Args:
      key: the config key that asks for it, for the message.
    """
    sampler, learner = allocation.sampler, allocation.learner
    if sampler is None or learner is None or sampler.first_device != learner.first_device:
        raise UserError(f"{key}: is for engines on the same devices (allocation_mode with '|', or one pool)")
    if config.rollout.max_head_offpolicyness:
        raise UserError(f"{key}: is for synchronous runs (rollout.max_head_offpolicyness=0): others sample while they update")
