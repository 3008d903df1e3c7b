"""A worker as the trainer sees it: its leases, its requests, and the weights that it has."""

from __future__ import annotations

import asyncio
import dataclasses

from rljax.rollout.buffer import Ticket
from rljax.tracing import Process
from rljax.workers.connection import Connection


@dataclasses.dataclass(eq=False)
class AttachedWorker:
    """A worker that passed the handshake, as the trainer sees it."""

    connection: Connection
    name: str
    own_sampler: bool  # it has a sampler of its own
    capacity: int  # prompts at once
    leases: dict[tuple[int, int], Ticket] = dataclasses.field(default_factory=dict)  # by index and attempt
    requests: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)  # to the trainer's sampler, by number
    version: int | None = None  # of the weights that were sent to its own sampler
    ready: bool = False  # it has all it needs to begin
    revoking: int = 0  # `revoke` messages that it has not answered; what it sends before is of void leases
    transfer: asyncio.Task[None] | None = None  # sends files to it
    process: Process | None = None  # as the trace has it; None: it has sent nothing for the trace

    @property
    def free(self) -> int:
        """Number of prompts that it can take beside its leases."""
        return self.capacity - len(self.leases)
