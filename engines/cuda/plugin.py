"""The engine `sglang`: SGLang servers that this process starts."""

from __future__ import annotations

import os
from pathlib import Path

from rljax.allocation import Allocation, Pool
from rljax.config import Config
from rljax.engine import Learner, Sampler
from rljax.engines.cuda.transports import routes
from rljax.engines.http.launcher import SglangServers, installed_release, interpreter
from rljax.engines.http.plugin import TRANSPORTS, sampler_of
from rljax.engines.http.remote import TOKEN_VARIABLE
from rljax.errors import UserError

OLDEST = (0, 5, 17)  # in-place pause, weight_version and extra_key; older ones lack one of them


class SglangPlugin:
    dims = "dt"
    samples = True
    learns = False
    transports = TRANSPORTS

    def check(self, config: Config, allocation: Allocation) -> None:
        release = installed_release(interpreter(config.sglang))
        if release < OLDEST:
            found, oldest = ".".join(map(str, release)), ".".join(map(str, OLDEST))
            raise UserError(f"sglang.python: SGLang {found} is too old (install {oldest} or later)")

    def routes(self, config: Config, allocation: Allocation) -> tuple[str, ...]:
        return routes(config, allocation)

    def on_host(self, config: Config) -> bool:
        return config.sglang.device == "cpu"

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        servers = SglangServers(config, pool, model_dir, os.environ.get(TOKEN_VARIABLE))
        return sampler_of(config, servers.remotes, version=0, replicas=servers)

    def make_learner(self, config: Config, pool: Pool, model_dir: Path) -> Learner:
        raise UserError("allocation_mode: sglang cannot learn (add a learner: sglang:d1+fsdp:d1, or +jax:d1)")


SGLANG = SglangPlugin()
