"""Checks the servers of an `HttpSampler`, restarts ours, and readmits those that recover.

    usable --(3 checks unanswered, or a request lost)--> lost
    lost   --(answers, and has or loads the present weights)--> usable
    lost   --(silent for PATIENCE, or can't be started)--> dropped

A dropped server is still checked, and comes back if it answers after all. /health is not used for
checks: it samples a token, which a paused server can't.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from rljax.engines.http.interfaces import Replicas, Watched
from rljax.engines.http.remote import Remote, ServerLost
from rljax.engines.http.replies import version_of
from rljax.errors import SamplerError, UserError

log = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between checks
SILENCE = 3  # unanswered checks in a row until a server is lost
CHECK_TIMEOUT = 20.0  # seconds
PATIENCE = 60.0  # seconds until a silent server that isn't ours is dropped
LOAD_TIMEOUT = 600.0  # seconds


class Watch:
    def __init__(self, sampler: Watched, remotes: list[Remote], replicas: Replicas | None) -> None:
        self._sampler, self._remotes, self._replicas = sampler, remotes, replicas
        self._check_requested = asyncio.Event()
        self._unanswered: dict[int, int] = {}
        self._lost_since: dict[int, float] = {}
        self._restarts: dict[int, asyncio.Task[None]] = {}

    def check_now(self) -> None:
        """Checks the servers now, without waiting for the interval."""
        self._check_requested.set()

    async def run(self) -> None:
        """Checks all servers at intervals, until cancelled."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL):  # Python 3.11's wait_for may swallow a cancellation
                        await self._check_requested.wait()
                self._check_requested.clear()
                await asyncio.gather(*(self._check_one(index) for index in range(len(self._remotes))))
                await asyncio.sleep(INTERVAL / 20)  # don't check a flapping server in a busy loop
        finally:
            for task in self._restarts.values():
                task.cancel()

    async def _check_one(self, index: int) -> None:
        if index in self._restarts:
            return
        why = self._replicas.died(index) if self._replicas is not None else None
        if why is not None:
            self._begin_restart(index, why)
            return
        remote = self._remotes[index]
        try:
            await (self._check(remote) if remote.usable else self._bring_back(remote))
        except (ServerLost, SamplerError, UserError) as error:
            self._failed(index, remote, str(error))
        else:
            self._unanswered[index] = 0
            if remote.usable:
                self._lost_since.pop(index, None)

    async def _check(self, remote: Remote) -> None:
        await remote.get(self._sampler.session, "/get_model_info", CHECK_TIMEOUT)

    async def _bring_back(self, remote: Remote) -> None:
        """Makes a server usable again; does nothing while sampling is paused.

        Raises if the server doesn't answer or can't load the weights.
        """
        session = self._sampler.session
        await self._check(remote)  # outside the lock: a server that doesn't answer must not delay a publish
        async with self._sampler.control:
            if self._sampler.paused:
                return
            if remote.released:  # the same process, for a restarted server is a new Remote
                await self._sampler.reclaim_one(remote)
            info = await remote.get(session, "/get_model_info", CHECK_TIMEOUT)
            if version_of(str(info["weight_version"])) != self._sampler.version:
                directory = self._sampler.present_weights()
                if directory is None:
                    remote.reason = f"{remote.base}: has other weights than version {self._sampler.version}"
                    remote.behind, remote.dropped = True, False
                    self._sampler.lack_weights()
                    return
                body = {"model_path": directory, "weight_version": str(self._sampler.version), "flush_cache": False}
                await remote.post(session, "/update_weights_from_disk", body, LOAD_TIMEOUT)
            await remote.post(session, "/continue_generation", {}, CHECK_TIMEOUT)
            remote.usable, remote.behind, remote.dropped, remote.reason = True, False, False, ""
        log.warning("%s is back", remote.base)
        self._sampler.servers_changed()

    def _failed(self, index: int, remote: Remote, reason: str) -> None:
        self._unanswered[index] = self._unanswered.get(index, 0) + 1
        since = self._lost_since.setdefault(index, time.monotonic())
        if remote.usable and self._unanswered[index] >= SILENCE:
            log.warning("%s gets no more requests: %s", remote.base, reason)
            remote.lost(reason)
        if not remote.usable:
            remote.reason = reason
            # Our own servers are running, or they would be restarted: they may just be slow.
            if self._replicas is None and not remote.dropped and time.monotonic() - since > PATIENCE:
                log.error("%s is dropped: %s", remote.base, reason)
                remote.dropped = True
        self._sampler.servers_changed()

    def _begin_restart(self, index: int, why: str) -> None:
        remote = self._remotes[index]
        if remote.dropped:
            return
        log.warning("%s died and is being restarted: %s", remote.base, why)
        remote.lost(why)
        self._sampler.servers_changed()
        self._restarts[index] = asyncio.ensure_future(self._restart(index))

    async def _restart(self, index: int) -> None:
        assert self._replicas is not None
        try:
            remote = await asyncio.to_thread(self._replicas.restart, index)
            remote.lost("has just been restarted")
            self._remotes[index] = remote
        except (UserError, SamplerError, ServerLost) as error:
            log.error("%s is dropped: %s", self._remotes[index].base, error)
            self._remotes[index].dropped, self._remotes[index].reason = True, str(error)
            self._sampler.servers_changed()
        finally:
            del self._restarts[index]
            self.check_now()
