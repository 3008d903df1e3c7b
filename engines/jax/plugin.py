"""The engine `jax`: the JAX sampler and learner, on TPU, GPU or CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import Learner, Plugin, PortableState, Sampler, check_lending
from rljax.engine.rank import ProcessRank
from rljax.engines.jax import FORMAT
from rljax.engines.jax.config import JaxConfig
from rljax.errors import UserError
from rljax.hf.spec import CONFIG, ModelSpec, takes_pictures
from rljax.hf.splits import Shape, check_shards, check_tensor
from rljax.planning.planner import Planner

NAME = "jax"  # of the entry point


class JaxPlugin(Plugin):
    """Plugin of the JAX sampler and learner. jax is imported only when one of them is made."""

    dims = "dtf"
    samples = True
    learns = True
    transports = ("memory", "directory")
    formats = (FORMAT,)
    config_class = JaxConfig

    def check_settings(self, config: Config, allocation: Allocation) -> None:
        """Refuses settings that the JAX engine can't do.

        Devices are only looked for when an engine is made.
        """
        sampler, learner, settings = allocation.sampler, allocation.learner, JaxConfig.of(config)
        if not config.actor.init_from_scratch and takes_pictures(config.actor.path):
            path = config.actor.path
            raise UserError(
                f"allocation_mode: {path} is an image-text model, and the JAX path takes text (sglang+fsdp: docs/vision.md)"
            )
        _check_splits(config, [pool for pool in (sampler, learner) if pool is not None and pool.engine == NAME])
        if sampler is not None and sampler.engine == NAME:
            _check_context(config)
            _check_positions(config)
            settings.check_slots(sampler.data * sampler.fsdp)
            if settings.release_memory:
                check_lending(config, allocation, "jax.release_memory")
        if not settings.bitwise or sampler is None or learner is None:
            return
        if sampler.engine != learner.engine:
            raise UserError("jax.bitwise: sampler and learner must both be jax, for one program scores for both")
        if (sampler.data, sampler.fsdp, sampler.tensor) != (learner.data, learner.fsdp, learner.tensor):
            raise UserError(f"jax.bitwise: pools of one shape only ({sampler} and {learner} add up in different orders)")

    def check_devices(self, config: Config, allocation: Allocation) -> None:
        """Makes the meshes of its pools, unless one device is enough or others bring theirs."""
        from rljax.engine.rank import from_environment

        if allocation.devices == 1 or JaxConfig.of(config).processes not in (None, 1) or from_environment().size > 1:
            return
        from rljax.backends.jax.mesh import pool_mesh

        for pool, sampling in ((allocation.learner, False), (allocation.sampler, True)):
            if pool is not None and pool.engine == NAME:
                pool_mesh(pool, sampling=sampling)

    def prepare(self) -> None:
        from rljax.engines.jax.tuning import prepare_host

        prepare_host()

    def context_length(self, config: Config) -> int:
        return JaxConfig.of(config).context_length

    def planner(self) -> Planner:
        from rljax.engines.jax.planning.footprint import JaxPlanner

        return JaxPlanner()

    def devices(self) -> list[str]:
        import jax

        return [device.device_kind for device in jax.local_devices()]

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        from rljax.engines.jax.sampling.sampler import JaxSampler

        _use_compilation_cache(config)
        return JaxSampler(config, pool, model_dir)

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> Learner:
        from rljax.engines.jax.learning.distributed import join
        from rljax.engines.jax.learning.learner import JaxLearner

        join()
        _use_compilation_cache(config)
        return JaxLearner(config, pool, model_dir)

    def processes(self, config: Config, pool: Pool) -> int | None:
        """Any number, each with its devices: so many as are asked for, else as a launcher started."""
        return JaxConfig.of(config).processes or None

    def process(self, config: Config, pool: Pool) -> ProcessRank | None:
        """Finds the rank from the machine if `jax.processes` is 0."""
        if JaxConfig.of(config).processes != 0:
            return None
        from rljax.engines.jax.learning.distributed import find

        return find()

    def on_pod(self) -> Mapping[str, object]:
        return {f"{NAME}.processes": 0}

    def read_checkpoint(self, directory: Path) -> PortableState:
        if "jax" not in sys.modules:  # of a process that does something else with its accelerators
            import jax

            jax.config.update("jax_platforms", "cpu")
        from rljax.engines.jax.learning.state import read

        return read(directory)


def _use_compilation_cache(config: Config) -> None:
    """Programs compiled once are found there by later processes.

    Without the key, JAX's own environment variable holds.
    """
    if directory := JaxConfig.of(config).compilation_cache:
        import jax

        jax.config.update("jax_compilation_cache_dir", directory)


def _check_splits(config: Config, pools: Sequence[Pool]) -> None:
    """Refuses a model of a family that the JAX path doesn't have, or that pools can't split."""
    path = Path(config.actor.path)
    shape: Shape = config.actor.init
    if not config.actor.init_from_scratch:
        if not (path / CONFIG).is_file():
            return  # whoever loads it says what is missing
        shape = ModelSpec.from_directory(path)
    for pool in pools:
        check_tensor(shape, pool.tensor, key_heads=False)
        check_shards(shape, pool.fsdp)


def _check_context(config: Config) -> None:
    """A slot must hold the longest prompt that the data may bring, and what is sampled after it."""
    prompt, completion = config.train_dataset.max_length or 1, config.gconfig.max_new_tokens
    context = JaxConfig.of(config).context_length
    if context < prompt + completion:
        raise UserError(
            f"jax.context_length: {context} tokens cannot hold a prompt "
            f"(train_dataset.max_length={config.train_dataset.max_length}) and gconfig.max_new_tokens={completion}"
        )


def _check_positions(config: Config) -> None:
    """A rotary embedding is defined at any position, and beyond those it was made for the model
    says nothing sensible.
    """
    actor, context = config.actor, JaxConfig.of(config).context_length
    if actor.init_from_scratch:
        positions, where = actor.init.max_position_embeddings, "actor.init.max_position_embeddings"
    elif (Path(actor.path) / CONFIG).is_file():
        positions, where = _positions(ModelSpec.from_directory(actor.path)), f"{Path(actor.path) / CONFIG}"
    else:
        return  # whoever loads it says what is missing
    if context > positions:
        raise UserError(f"jax.context_length: {context} tokens are more than the {positions} positions of the model ({where})")


def _positions(spec: ModelSpec) -> int:
    """Returns how many positions the rotary embeddings reach.

    yarn and llama3 stretch their original length, whatever the model says it has.
    """
    stretched = [round(rope.factor * rope.original_length) for rope in spec.ropes]
    return max(spec.max_position_embeddings, *stretched)


PLUGIN = JaxPlugin()
