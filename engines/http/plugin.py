"""The engine `http`: a sampler that runs elsewhere already, at `rollout.addr`."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import Plugin, Sampler
from rljax.engines.http.client import HttpSampler
from rljax.engines.http.config import SglangConfig
from rljax.engines.http.interfaces import Replicas
from rljax.engines.http.remote import TOKEN_VARIABLE, Remote, ServerLost, inspect, normalized
from rljax.errors import SamplerError, UserError

ANYWHERE = ("", "directory")  # of sglang.transport, the ways to servers of which nothing is known
TRANSPORTS = ("ipc", "nccl", "gloo", "directory")  # of servers that speak SGLang's protocol; ours take directories only


def attach(config: Config) -> HttpSampler:
    """A sampler of the servers at `rollout.addr`, one or several with commas between. Blocks.

    Its version is the newest that a server has; servers with older weights wait for the next
    publish.

    Raises UserError when an address doesn't answer as a server does.
    """
    token, transport = os.environ.get(TOKEN_VARIABLE), SglangConfig.of(config).transport
    addresses = [part.strip() for part in config.rollout.addr.split(",") if part.strip()]
    if not addresses:
        raise UserError("rollout.addr: empty (HOST:PORT of a running server; `rljax serve` starts one)")
    found = []
    for base in map(normalized, addresses):
        try:
            facts, version = inspect(base, token)
        except (ServerLost, SamplerError) as error:
            raise UserError(f"rollout.addr: {error} (is a server running there?)") from None
        if transport not in ANYWHERE and facts.tensor > 1:
            raise UserError(
                f"sglang.transport: {transport} leads to servers on one device each, and {base} is on "
                f"{facts.tensor} (directory leads to any)"
            )
        found.append((Remote(base, facts, token), version))
    newest = max(version for _, version in found)
    for remote, version in found:
        if version != newest:
            remote.lost(f"{remote.base}: has version {version}, not {newest}")
            remote.behind = True
    return sampler_of(config, [remote for remote, _ in found], newest)


def sampler_of(config: Config, remotes: Sequence[Remote], version: int, replicas: Replicas | None = None) -> HttpSampler:
    """As `rollout` wants it."""
    rollout = config.rollout
    return HttpSampler(
        remotes,
        version=version,
        request_retries=rollout.request_retries,
        recompute=rollout.recompute_kv_on_publish,
        replicas=replicas,
        lends=SglangConfig.of(config).release_memory,
    )


def _is_here(base: str) -> bool:
    host = urlsplit(base).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpPlugin(Plugin):
    """No device of this machine: servers that anybody started."""

    samples = True
    attaches = True
    transports = TRANSPORTS

    def routes(self, config: Config, allocation: Allocation) -> tuple[str, ...]:
        """What a server that runs already can do, and on which devices, only its user knows: a
        directory always works.
        """
        return (SglangConfig.of(config).transport or "directory",)

    def check(self, config: Config, allocation: Allocation) -> None:
        bases = [normalized(part.strip()) for part in config.rollout.addr.split(",")]
        elsewhere = [base for base in bases if not _is_here(base)]
        transport = SglangConfig.of(config).transport
        if elsewhere and transport not in ANYWHERE:
            raise UserError(
                f"sglang.transport: {transport} leads to servers on this machine, and {elsewhere[0]} may be "
                "on another (directory leads to any that reads the same files)"
            )

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        return attach(config)


PLUGIN = HttpPlugin()
