"""The processes of a JAX learner: found by JAX itself, or as torchrun's environment and the leader
say.
"""

from __future__ import annotations

import secrets
import socket

import jax

from rljax.backends.jax import multihost
from rljax.engine.rank import ProcessRank, from_environment


def join() -> None:
    """This process joins the others, if there are any. Several on a host take one GPU each."""
    process = from_environment()
    if process.size > 1:
        multihost.join(process.coordinator, process.size, process.rank, process.local_rank if process.local_size > 1 else None)


def find() -> ProcessRank:
    """Asks JAX for this process's rank, on a pod for example.

    Raises UserError if JAX finds no other processes.
    """
    multihost.join_found()
    launch = multihost.shared_number(secrets.randbelow(2**31))
    return ProcessRank(jax.process_index(), jax.process_count(), address=_address(), launch=f"jax {launch}")


def _address() -> str:
    """Returns the address by which other hosts reach this one.

    It is the one that traffic to elsewhere leaves by; nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
