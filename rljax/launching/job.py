"""Job: which processes a run has on how many hosts, worked out from its config and a topology.

the pools fit one host            one process there, which starts all others itself
one engine, in one process a      a process per host; the sampler is on the first one's devices
  host (JAX), and a sampler that
  leaves that host a device
otherwise                         the learner's processes, a process per device or per host as its
                                  engine wants them, and servers on hosts of their own
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljax.chips import TPU
from rljax.config.allocation import Allocation, Pool
from rljax.config.schema import Config
from rljax.engine import find_plugin
from rljax.engine.plugins import MEMORY, allocate, require_both, transport_of
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.launching.hosts import Hosts, check_shared, largest_host, single_host
from rljax.planning.load import Load
from rljax.planning.planner import Job as Planned

MASTER_PORT, SERVER_PORT = 29500, 30000
ATTACH_TIMEOUT = 1200  # seconds for servers to come up; below the time in which a start must move (process/watchdog.py)
FILE = "job.json"


@dataclasses.dataclass(frozen=True)
class Side:
    """Processes of one kind: those that train, or the servers."""

    command: tuple[str, ...]  # of each process, to which `host.py` adds what only it knows
    hosts: int
    devices: int  # accelerators of a host, as clusters count them; 0 on CPUs
    processes: int = 1  # of a host
    ranked: bool = False  # each process is told its rank; False: it is alone, or finds the others by itself
    slice: str = ""  # TPU topology of the hosts together; "" for other devices
    accelerator: str = ""  # GKE's name of the TPU


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything that it takes to start a run on its hosts; job.json has the same."""

    name: str
    workdir: str
    directory: str  # in which all commands run
    python: str
    platform: str  # "gpu", "tpu" or "cpu"
    train: Side
    serve: Side | None
    environment: Mapping[str, str]
    restarts: int  # of the training side, after a failure
    grace: int  # seconds that a run has to save when it is told to stop

    @property
    def hosts(self) -> int:
        return self.train.hosts + (self.serve.hosts if self.serve else 0)

    def side(self, name: str) -> Side:
        """Returns "train" or "serve". Raises UserError if the job has none of that name."""
        side = {"train": self.train, "serve": self.serve}.get(name)
        if side is None:
            raise UserError(f"--side: {name!r}: this job has {'train and serve' if self.serve else 'train alone'}")
        return side

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_file(cls, path: Path) -> Job:
        """Reads job.json. Raises UserError."""
        try:
            fields = json.loads(path.read_text())
            sides = {name: fields[name] and _side(fields[name]) for name in ("train", "serve")}
            return cls(**(fields | sides))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror} (experiments.launch writes it)") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: is no job ({error}; experiments.launch writes one)") from None


def _side(fields: dict[str, Any]) -> Side:
    return Side(**(fields | {"command": tuple(fields["command"])}))


@dataclasses.dataclass(frozen=True)
class Where:
    """Settings of a job that the config does not have."""

    hosts: Hosts  # of the training side
    arguments: Sequence[str]  # --config and its keys, as the user gave them
    model: ModelSpec | None = None  # its shape; None: not known here, and how pools split it is not checked
    name: str = "rljax"
    workdir: str = ""
    directory: str = ""
    python: str = "python"
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restarts: int = 3
    grace: int = 300


def job_of(config: Config, where: Where) -> Job:
    """Works out the processes of a run.

    Raises UserError for an allocation that these hosts can't hold, or that the model can't be split
    over.
    """
    pools = allocate(config)
    samples, learns = require_both(pools)
    hosts, platform = where.hosts, where.hosts.topology.chip.platform
    apart = bool(config.rollout.addr) or find_plugin(samples.engine).on_host(config)  # the sampler takes no device here
    _check_engines(config, pools, hosts, apart)
    servers, why = (None, "") if apart else _servers(config, pools, hosts, samples, learns)
    if servers or apart:
        _require_all(hosts, learns, why)
    _check_learner(config, where, learns)
    if not servers and not apart:
        _check_sampler(config, where, samples)
    processes, ranked, more = _processes(config, learns, hosts, platform)
    train = Side(
        command=(*where.arguments, *more, *(_attaching(config, where) if servers else [])),
        hosts=hosts.count,
        devices=0 if platform == "cpu" else hosts.chips,
        processes=processes,
        ranked=ranked,
        slice=hosts.slice,
        accelerator=hosts.accelerator if platform == TPU else "",
    )
    return Job(
        name=where.name,
        workdir=where.workdir,
        directory=where.directory,
        python=where.python,
        platform=platform,
        train=train,
        serve=None if servers is None else _serve(config, servers, hosts, where),
        environment=dict(where.environment),
        restarts=where.restarts,
        grace=where.grace,
    )


def _check_engines(config: Config, pools: Allocation, hosts: Hosts, apart: bool) -> None:
    """Raises UserError if an engine refuses the config, wherever it runs, or these devices."""
    for engine in pools.engines:
        find_plugin(engine).check_settings(config, pools)
    for pool in (pools.learner, None if apart else pools.sampler):
        planner = pool and find_plugin(pool.engine).planner()
        if planner:  # without one an engine says nothing about devices
            planner.usable(hosts.topology.chip)


def _servers(config: Config, pools: Allocation, hosts: Hosts, samples: Pool, learns: Pool) -> tuple[Pool | None, str]:
    """Returns the sampler's pool if it becomes servers on hosts of their own, and why."""
    if pools.devices <= hosts.devices:
        if hosts.count > 1:
            raise UserError(
                f"--topology: {hosts.topology.name} is {hosts.count} hosts of {hosts.devices} devices, and {pools} takes"
                f" {pools.devices} in all, which one host has"
            )
        return None, ""
    check_shared(pools, hosts)
    if find_plugin(learns.engine).processes(config, learns) is not None or transport_of(config, pools) != MEMORY:
        return samples, f"{samples.engine} is not in the processes of {learns.engine}"
    if samples.size >= hosts.devices:
        return samples, f"{samples} would leave the first host none of its {hosts.devices} devices"
    if pools.devices != hosts.topology.devices:
        return samples, f"{pools} is {pools.devices} devices"
    return None, ""


def _require_all(hosts: Hosts, learns: Pool, why: str) -> None:
    """Raises UserError unless the learner alone has all devices of its hosts, or one host's first.

    Args:
      why: the sampler is not on these hosts; "" if nobody would expect it there.
    """
    found, name = hosts.topology.devices, hosts.topology.name
    if learns.size == found or (learns.size < found and hosts.count == 1):
        return
    beside = f"; the sampler has other hosts, which --topology does not count, as {why}" if why else ""
    raise UserError(f"--topology: {name} has {found} devices, and {learns} learns on {learns.size}{beside}")


def _check_learner(config: Config, where: Where, pool: Pool) -> None:
    """Raises UserError if the engine, as its planner knows it, can't split the model so."""
    planner = find_plugin(pool.engine).planner()
    if planner is not None and where.model is not None:
        planner.learner(Planned(config, where.model, pool, where.hosts.topology.chip, Load.of(config)))


def _check_sampler(config: Config, where: Where, pool: Pool) -> None:
    """Raises UserError if the engine, as its planner knows it, can't split the model so, or would
    not start.
    """
    plugin = find_plugin(pool.engine)
    planner = plugin.planner()
    if planner is None or where.model is None:
        return
    load = Load.of(config, context=plugin.context_length(config))
    if problem := planner.sampler(Planned(config, where.model, pool, where.hosts.topology.chip, load)).problem:
        raise UserError(problem)


def _processes(config: Config, learns: Pool, hosts: Hosts, platform: str) -> tuple[int, bool, list[str]]:
    """Returns the processes of a host, whether they are told their ranks, and flags they need."""
    if hosts.count == 1:
        return 1, False, []
    plugin = find_plugin(learns.engine)
    count = plugin.processes(config, learns)
    if count is None and platform == TPU and (found := plugin.on_pod()):
        return 1, False, [f"--config.{key}={value}" for key, value in found.items()]
    if count is not None and count % hosts.count:
        raise UserError(
            f"allocation_mode: {learns} learns in {count} process{'es' if count > 1 else ''}, which {hosts.count} hosts"
            " can't share evenly"
        )
    return 1 if count is None else count // hosts.count, True, []


def _attaching(config: Config, where: Where) -> list[str]:
    """Returns flags with which training waits for its servers, and hands them weights as files."""
    published = [] if config.rollout.publish_dir else [f"--config.rollout.publish_dir={where.workdir}"]
    return [f"--config.rollout.attach_timeout={ATTACH_TIMEOUT}", *published]


def _serve(config: Config, pool: Pool, hosts: Hosts, where: Where) -> Side:
    """Returns the servers of a sampler's pool: as many hosts as it fills, with equal shares of it."""
    replica = pool.size // pool.data
    most = largest_host(hosts)
    count = next(
        (n for n in range(1, pool.data + 1) if pool.data % n == 0 and pool.size // n <= most),
        None,
    )
    if count is None:
        raise UserError(
            f"allocation_mode: a replica of {pool} takes {replica} devices, and a host of {hosts.topology.name} has {most}"
        )
    share = dataclasses.replace(pool, data=pool.data // count, first_device=0)
    _check_sampler(config, where, share)
    host = single_host(hosts.topology, share.size)
    on_cpu = hosts.topology.chip.platform == "cpu"
    return Side(
        command=(
            *where.arguments,
            f"--config.allocation_mode={share}",
            "--config.serve.host=0.0.0.0",
            f"--config.serve.port={SERVER_PORT}",
            f"--config.serve.weight_roots={[config.rollout.publish_dir or where.workdir]!r}",
        ),
        hosts=count,
        devices=0 if on_cpu else host.chips,
        slice=host.slice,
        accelerator=host.accelerator if host.slice else "",
    )


def topology_line(job: Job) -> str:
    """Describes a job in a line, for the screen."""
    each = f"{job.train.processes} process{'es' if job.train.processes > 1 else ''} each"
    parts = [f"{job.train.hosts} host{'s' if job.train.hosts > 1 else ''} to train, {each}"]
    if job.serve is not None:
        parts.append(f"{job.serve.hosts} host{'s' if job.serve.hosts > 1 else ''} to serve")
    return "; ".join(parts)
