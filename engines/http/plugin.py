"""The engine `http`: a sampler on servers that are already running at `rollout.addr`."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import Plugin, Sampler
from rljax.engines.http.client import HttpSampler
from rljax.engines.http.config import SglangConfig
from rljax.engines.http.interfaces import Replicas
from rljax.engines.http.remote import Remote, ServerInfo, ServerLost, base_url, inspect
from rljax.errors import SamplerError, UserError
from rljax.hf.read_model import check_unread
from rljax.messaging.token import UnsafeToken, token_to_send
from rljax.process.stages import stage

ANYWHERE = ("", "directory")  # values of sglang.transport that work with any server
ATTACH_INTERVAL = 1.0  # seconds between attempts to reach a server that is starting
TRANSPORTS = ("ipc", "nccl", "gloo", "directory")  # of SGLang's servers; ours load from directories only


def attach(config: Config, *, check: Callable[[str, ServerInfo, int], None] = lambda *_: None) -> HttpSampler:
    """Makes a sampler of the servers at `rollout.addr` (several are separated by commas). Blocks.

    Its version is the newest that a server has; servers with older weights wait for the next
    publish.

    Args:
      check: called with each server's base URL, properties and version; raises UserError for one
        that is not to be used.

    Raises UserError if an address doesn't answer as a sampling server does.
    """
    transport = SglangConfig.of(config).transport
    addresses = [part.strip() for part in config.rollout.addr.split(",") if part.strip()]
    if not addresses:
        raise UserError("rollout.addr: empty (HOST:PORT of a running server; `rljax serve` starts one)")
    found, until = [], time.monotonic() + config.rollout.attach_timeout
    for base in map(base_url, addresses):
        token = token_for(base)
        info, version = _inspect_when_up(base, token, until)
        if transport not in ANYWHERE and info.tensor > 1:
            raise UserError(
                f"sglang.transport: {transport} needs servers on one device each, and {base} is on "
                f"{info.tensor} (use directory)"
            )
        check(base, info, version)
        found.append((Remote(base, info, token), version))
    newest = max(version for _, version in found)
    for remote, version in found:
        if version != newest:
            remote.lost(f"{remote.base}: has version {version}, not {newest}")
            remote.behind = True
    return sampler_of(config, [remote for remote, _ in found], newest)


def _inspect_when_up(base: str, token: str | None, until: float) -> tuple[ServerInfo, int]:
    """Returns a server's properties, once it answers. Raises UserError if it does not in time.

    Args:
      until: by time.monotonic(); it is asked once in any case.
    """
    while True:
        try:
            return inspect(base, token)
        except (ServerLost, SamplerError) as error:
            if time.monotonic() > until:
                raise UserError(f"rollout.addr: {error} (is a server running there?)") from None
        time.sleep(ATTACH_INTERVAL)


def _check_model(base: str, info: ServerInfo, version: int) -> None:
    """Checks the model directory of a server of this machine that still has the weights of it.

    Our own server has looked at it. Raises UserError for a damaged model.
    """
    if info.ours or version != 0 or not _is_here(base) or not os.path.isabs(info.model_path):
        return
    try:
        with stage(f"reading the numbers in {info.model_path}"):
            check_unread(info.model_path)
    except UserError as error:
        raise UserError(f"rollout.addr: {base} serves a model that is damaged: {error}") from None


def sampler_of(config: Config, remotes: Sequence[Remote], version: int, replicas: Replicas | None = None) -> HttpSampler:
    """Makes the client of these servers with the settings of `rollout` and `sglang`."""
    rollout = config.rollout
    return HttpSampler(
        remotes,
        version=version,
        request_retries=rollout.request_retries,
        recompute=rollout.recompute_kv_on_publish,
        replicas=replicas,
        lends=SglangConfig.of(config).release_memory,
        control_timeout=config.control_timeout,
    )


def token_for(base: str) -> str | None:
    """Returns the token that a server is sent. Raises UserError if its file is not safe."""
    try:
        return token_to_send(to_this_machine=_is_here(base))
    except UnsafeToken as error:
        raise UserError(str(error)) from None


def _is_here(base: str) -> bool:
    host = urlsplit(base).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpPlugin(Plugin):
    """Plugin for servers that the run doesn't start; needs no device of this machine."""

    samples = True
    attaches = True
    transports = TRANSPORTS

    def routes(self, config: Config, allocation: Allocation) -> tuple[str, ...]:
        """Returns the configured transport, or "directory".

        Only the user knows what a running server supports and which devices it is on; a directory
        always works.
        """
        return (SglangConfig.of(config).transport or "directory",)

    def is_here(self, config: Config) -> bool:
        return all(_is_here(base_url(part.strip())) for part in config.rollout.addr.split(","))

    def check(self, config: Config, allocation: Allocation) -> None:
        bases = [base_url(part.strip()) for part in config.rollout.addr.split(",")]
        elsewhere = [base for base in bases if not _is_here(base)]
        transport = SglangConfig.of(config).transport
        if elsewhere and transport not in ANYWHERE:
            raise UserError(
                f"sglang.transport: {transport} needs servers on this machine, and {elsewhere[0]} may be "
                "on another (use directory, if it reads the same files)"
            )

    def make_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        return attach(config)

    def make_lone_sampler(self, config: Config, pool: Pool, model_dir: Path) -> Sampler:
        return attach(config, check=_check_model)


PLUGIN = HttpPlugin()
