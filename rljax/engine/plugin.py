"""Base class of plugins, which say what an engine can do and make its sampler and learner.

docs/engines.md writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config, EngineConfig
from rljax.engine.interface import Learner, PortableState, Sampler
from rljax.engine.rank import ProcessRank
from rljax.errors import UserError
from rljax.planning.planner import Planner


class Plugin:
    """Object behind an entry point of the group `rljax.engines`.

    The entry point's name is the engine's name in `allocation_mode`. Subclass it, set the
    attributes that differ, and override `make_sampler`, `make_learner` or both. Plugins are loaded
    just to ask what an engine can do: import frameworks where an engine is made, not with the
    module.

    Example:

        class MyPlugin(Plugin):
            samples = True

            def make_sampler(self, config, pool, model_dir):
                return MySampler(model_dir)

        PLUGIN = MyPlugin()

    and in pyproject.toml:

        [project.entry-points."rljax.engines"]
        mine = "my_package:PLUGIN"
    """

    dims: str = "d"
    """Dims of `allocation_mode` that it supports, of "dtpcef"."""

    samples: bool = False
    """True if it has a sampler."""

    learns: bool = False
    """True if it has a learner."""

    transports: tuple[str, ...] = ("directory",)
    """Transports by which it can take or give weights, best first: "memory", "nccl", "ipc", "directory", ..."""

    attaches: bool = False
    """True if its sampler can be servers that run already, at `rollout.addr`."""

    formats: tuple[str, ...] = ()
    """Checkpoint formats, as in meta.json, that `read_checkpoint` reads."""

    shadow: str = "fsdp"
    """Engine whose learner recomputes batches of this one's, unless `parity.shadow_engine` names another."""

    config_class: type[EngineConfig] | None = None
    """Frozen dataclass of the config section that has the engine's name; None for an engine without settings."""

    def check(self, config: Config, allocation: Allocation) -> None:
        """Checks that the engine can do what the config asks of it here. Starts nothing.

        Override it for what has to be installed or attached, and call `check_settings` in it.

        Raises UserError for a setting that the engine, in its roles in the allocation, can't do.
        """
        self.check_settings(config, allocation)

    def check_settings(self, config: Config, allocation: Allocation) -> None:
        """Checks the config wherever it is going to run: a plan asks too, on another machine.

        The model may not be there. Raises UserError as `check` does.
        """

    def check_devices(self, config: Config, allocation: Allocation) -> None:
        """Checks that the devices of its pools are here; may start a framework to count them.

        `experiments.check` asks, for what `check` can't tell and the engine's parts would refuse
        when they are made. Raises UserError.
        """

    def prepare(self) -> None:
        """Prepares this process for the engine, before any thread starts in it. Optional."""

    def context_length(self, config: Config) -> int | None:
        """Returns the most tokens of prompt and completion that its sampler has room for.

        None if it sets no limit of its own.
        """
        return None

    def on_host(self, config: Config) -> bool:
        """Returns whether its sampler uses none of the devices that `allocation_mode` counts."""
        return False

    def is_here(self, config: Config) -> bool:
        """Returns whether its sampler is on this machine, and reads its files and memory."""
        return True

    def routes(self, config: Config, allocation: Allocation) -> tuple[str, ...]:
        """Returns the `transports` that can be used with this config and allocation, best first.

        Raises UserError if the config asks for another.
        """
        return self.transports

    def devices(self) -> list[str]:
        """Returns the names of the devices that this process sees, for the record of a run.

        Called once its parts are made. By default it knows of none.
        """
        return []

    def planner(self) -> Planner | None:
        """Returns what estimates its memory and time for a plan; None if it can't be planned for."""
        return None

    # Making its parts. These block, and may compile.

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        """Makes the sampler with the weights of model_dir, at version 0.

        Raises UserError if it can't.
        """
        raise UserError(f"allocation_mode: {pool.engine} cannot sample (add a sampler before it: SAMPLER:d1+{pool})")

    def make_lone_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        """Makes the sampler for a command that has no learner, as `rljax serve` and `evaluate`.

        Override it if another program loads the model, which a learner would have read first: look
        at what it is going to load. Raises UserError if it can't be made, or the model is damaged.
        """
        return self.make_sampler(config, pool, model_dir)

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> Learner:
        """Makes the learner, or this process's part of it, from model_dir.

        Raises UserError if it can't.
        """
        raise UserError(f"allocation_mode: {pool.engine} cannot learn (add a learner after it: {pool}+LEARNER:d1)")

    # A learner in several processes (rljax/multiprocess)

    def processes(self, config: Config, pool: Pool) -> int | None:
        """Returns the number of processes that the learner needs.

        None for as many as the launcher started (1 without one). In each of them `make_learner`
        finds its rank in the environment, by torchrun's names and RLJAX_COORDINATOR, a HOST:PORT
        that is free on rank 0's host. All make the same calls in the same order with the same whole
        batch; each takes its own rows of it, what a call returns is whole everywhere, and rank 0
        alone writes exports.
        """
        return 1

    def process(self, config: Config, pool: Pool) -> ProcessRank | None:
        """Returns this process's rank if the machine itself knows it; None to read the environment.

        A framework's runtime may be joined to find out.
        """
        return None

    def on_pod(self) -> Mapping[str, object]:
        """Returns config keys with which its processes find each other on a TPU pod.

        Empty for an engine whose processes are told their ranks.
        """
        return {}

    # Checkpoints that other engines go on from

    def read_checkpoint(self, directory: Path) -> PortableState:
        """Reads a checkpoint of its learner without making a learner.

        Raises UserError if it is corrupt or can't be read.
        """
        raise UserError(f"checkpoint: {directory} can only be read by the engine that wrote it")


def check_lending(config: Config, allocation: Allocation, key: str) -> None:
    """Checks that a sampler can lend its memory: to a learner on its devices, in a synchronous run.

    For a plugin's `check`. Raises UserError if it can't.

    Args:
      key: the config key that asks for it, for the message.
    """
    sampler, learner = allocation.sampler, allocation.learner
    if sampler is None or learner is None or sampler.first_device != learner.first_device:
        raise UserError(f"{key}: is for engines on the same devices (allocation_mode with '|', or one pool)")
    if config.rollout.max_head_offpolicyness:
        raise UserError(f"{key}: is for synchronous runs (rollout.max_head_offpolicyness=0): others sample during updates")
