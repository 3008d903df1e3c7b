"""The plugins `sglang` (SGLang servers that the run starts) and `fsdp` (the PyTorch learner)."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import Learner, Plugin, PortableState, Sampler, check_lending
from rljax.engines.cuda import FORMAT
from rljax.engines.cuda.config import FsdpConfig
from rljax.engines.cuda.devices import check_fit, visible_gpus
from rljax.engines.cuda.transports.routes import routes
from rljax.engines.http.config import SglangConfig
from rljax.engines.http.launcher import SglangServers, installed_release, interpreter
from rljax.engines.http.plugin import TRANSPORTS, sampler_of
from rljax.engines.jax.config import JaxConfig
from rljax.errors import UserError
from rljax.hf.other_model import OtherModel
from rljax.hf.read_model import check_unread, read_model
from rljax.hf.spec import CONFIG, ModelSpec, is_image_text, takes_pictures
from rljax.hf.splits import Shape, check_copied_heads, check_tensor
from rljax.hf.tensors import projections
from rljax.planning.planner import Planner
from rljax.process.stages import stage

OLDEST = (0, 5, 17)  # the first release with in-place pause, weight_version and extra_key


class SglangPlugin(Plugin):
    """SGLang servers on the pool's devices, one per data-parallel replica."""

    dims = "dt"
    samples = True
    transports = TRANSPORTS
    config_class = SglangConfig

    def check(self, config: Config, allocation: Allocation) -> None:
        self.check_settings(config, allocation)
        release = installed_release(interpreter(SglangConfig.of(config)))
        if release < OLDEST:
            found, oldest = ".".join(map(str, release)), ".".join(map(str, OLDEST))
            raise UserError(f"sglang.python: SGLang {found} is too old (install {oldest} or later)")
        check_fit(dataclasses.replace(allocation, learner=None), visible_gpus(), on_host=self.on_host(config))

    def check_settings(self, config: Config, allocation: Allocation) -> None:
        if not config.actor.init_from_scratch and takes_pictures(config.actor.path):
            if not SglangConfig.of(config).enable_multimodal:
                raise UserError(f"sglang.enable_multimodal: {config.actor.path} holds an image-text model (set it)")
        elif not config.actor.init_from_scratch and is_image_text(config.actor.path):
            remedy = "AutoModelForCausalLM's text model, saved by itself"
            raise UserError(
                f"actor.path: {config.actor.path} holds an image-text model, which sglang would load whole ({remedy})"
            )
        if SglangConfig.of(config).release_memory:
            check_lending(config, allocation, "sglang.release_memory")
        if allocation.sampler is not None and (spec := _shape_of(config)) is not None:
            check_tensor(spec, allocation.sampler.tensor, key_heads=False)
            check_copied_heads(spec, allocation.sampler.tensor)

    def context_length(self, config: Config) -> int | None:
        return SglangConfig.of(config).context_length

    def routes(self, config: Config, allocation: Allocation) -> tuple[str, ...]:
        return routes(config, allocation)

    def planner(self) -> Planner:
        from rljax.engines.cuda.planning.footprint import SglangPlanner

        return SglangPlanner()

    def on_host(self, config: Config) -> bool:
        return SglangConfig.of(config).device == "cpu"

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        servers = SglangServers(config, pool, model_dir)
        return sampler_of(config, servers.remotes, version=0, replicas=servers)

    def make_lone_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        """Reads the model's numbers before the servers start: SGLang would answer by NaN."""
        with stage(f"reading the numbers in {model_dir}"):
            check_unread(model_dir)
        return self.make_sampler(config, pool, model_dir)


class FsdpPlugin(Plugin):
    """Plugin of the PyTorch learner. torch is imported only when the learner is made."""

    dims = "dtcf"  # not p or e: FSDP2 shards every layer, and the supported models have no experts
    learns = True
    transports = TRANSPORTS
    formats = (FORMAT,)
    shadow = "jax"
    config_class = FsdpConfig

    def check(self, config: Config, allocation: Allocation) -> None:
        missing = [name for name in ("torch", *(["peft"] if config.actor.lora.rank else [])) if find_spec(name) is None]
        if missing:
            raise UserError(f"allocation_mode: fsdp needs {missing[0]} (pip install 'rljax[torch]>=0.1')")
        self.check_settings(config, allocation)
        check_fit(allocation, visible_gpus(), on_host=True)  # the sampler's engine counts its own

    def check_settings(self, config: Config, allocation: Allocation) -> None:
        if JaxConfig.of(config).bitwise:
            raise UserError("jax.bitwise: needs the JAX learner (sampler and learner must both be jax)")
        pool = allocation.learner
        if not config.actor.init_from_scratch and takes_pictures(config.actor.path) and pool is not None:
            split = [dim for dim, size in (("t", pool.tensor), ("c", pool.context)) if size > 1]
            if split:
                path = config.actor.path
                raise UserError(
                    f"allocation_mode: {path} is an image-text model, which fsdp splits over d and f only, not {split[0]}"
                )
        if pool is not None:
            _check_family(config, pool)

    def planner(self) -> Planner:
        from rljax.engines.cuda.planning.footprint import FsdpPlanner

        return FsdpPlanner()

    def devices(self) -> list[str]:
        import torch

        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> Learner:
        from rljax.engines.cuda.learning.learner import TorchLearner

        return TorchLearner(config, pool, model_dir)

    def processes(self, config: Config, pool: Pool) -> int:
        """Returns one process per device."""
        return pool.size

    def read_checkpoint(self, directory: Path) -> PortableState:
        if find_spec("torch") is None:
            raise UserError(
                f"checkpoint: {directory} is of the engine fsdp; reading it needs torch (pip install 'rljax[torch]>=0.1')"
            )
        from rljax.engines.cuda.learning.portable import read

        return read(directory)


def _check_family(config: Config, pool: Pool) -> None:
    """Refuses a split that the model doesn't have, and what fsdp can't do with a model of a family
    that rljax does not know itself.
    """
    if config.actor.init_from_scratch:
        check_tensor(config.actor.init, pool.tensor, key_heads=True)
    for key, path in (("actor.path", config.actor.path), ("actor.distill.teacher", config.actor.distill.teacher)):
        if not path or not (Path(path) / CONFIG).is_file():
            continue  # whoever loads it says what is missing
        model = read_model(path)
        if not isinstance(model, OtherModel):
            check_tensor(model, pool.tensor, key_heads=True)
            continue
        for dim, size in (("t", pool.tensor), ("c", pool.context)):
            if size > 1:
                family = f"{key} is of the family {model.architecture!r}"
                raise UserError(f"allocation_mode: {family}, which fsdp splits over d and f only, not {dim}")
    if config.actor.lora.rank and config.actor.path and (Path(config.actor.path) / CONFIG).is_file():
        have = {name.split(".")[-1] for name in projections(read_model(config.actor.path))}
        if lacking := [name for name in config.actor.lora.target_modules if name not in have]:
            raise UserError(
                f"actor.lora.target_modules: the model of {config.actor.path} has no projection {lacking[0]!r}"
                f" (it has {', '.join(sorted(have)) or 'none that adapters are added to'})"
            )


def _shape_of(config: Config) -> Shape | None:
    """Returns the shape of the config's model; None for one that SGLang alone knows, or none."""
    actor = config.actor
    if actor.init_from_scratch:
        return actor.init
    try:
        return ModelSpec.from_directory(actor.path) if actor.path and (Path(actor.path) / CONFIG).is_file() else None
    except UserError:
        return None


SGLANG = SglangPlugin()
FSDP = FsdpPlugin()
