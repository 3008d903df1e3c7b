"""Rank of one process of a learner that lives in several, from a launcher's environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator, Mapping

from rljax.errors import UserError

LOOPBACK = "127.0.0.1"
COORDINATOR = "RLJAX_COORDINATOR"  # HOST:PORT, for a framework that finds its processes itself (jax.distributed)
LAUNCH = "RLJAX_LAUNCH"


@dataclasses.dataclass(frozen=True)
class ProcessRank:
    """One process of `size`; rank 0 leads.

    Example: ProcessRank(rank=3, size=16, local_rank=3, local_size=8, address="10.0.0.4")
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this host
    local_size: int = 1
    address: str = LOOPBACK  # of rank 0's host
    port: int = 0  # for torch.distributed: a free port there, or that of the launcher's store
    launch: str = ""  # identifies one start of the processes
    coordinator: str = ""  # HOST:PORT, free on rank 0's host; the leader chooses it

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size

    def variables(self) -> dict[str, str]:
        """Returns torchrun's environment variables and rljax's."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            LAUNCH: self.launch,
            COORDINATOR: self.coordinator,
        }

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """Sets the variables while a learner is made, because frameworks read their rank there.

        Servers that are started later do not see them.
        """
        variables = self.variables() if self.size > 1 else {}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def from_environment(environment: Mapping[str, str] = os.environ) -> ProcessRank:
    """Returns the rank that torchrun, or whoever sets its variables, gave this process.

    Raises UserError if the variables make no sense.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return ProcessRank()
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if size == 1:
        return ProcessRank()
    if not 0 <= rank < size:
        raise UserError(f"environment: RANK={rank} is not one of WORLD_SIZE={size} processes (as torchrun sets them)")
    if "MASTER_ADDR" not in environment:
        raise UserError(f"environment: WORLD_SIZE={size} but no MASTER_ADDR (torchrun sets both)")
    local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0
    local_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else 1
    address = environment["MASTER_ADDR"]
    port = _number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else 0
    coordinator = environment.get(COORDINATOR, "")
    return ProcessRank(rank, size, local_rank, local_size, address, port, _launch(environment), coordinator)


def _launch(environment: Mapping[str, str]) -> str:
    if LAUNCH in environment:
        return environment[LAUNCH]
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(environment[name] for name in names if name in environment)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"environment: {name}={environment[name]!r} is not a number (as torchrun sets it)") from None


def free_port(host: str) -> int:
    """Returns a port of `host` that nothing listens on now."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError:  # a name of this host that is not one of its addresses
            probe.bind(("", 0))
        return int(probe.getsockname()[1])
