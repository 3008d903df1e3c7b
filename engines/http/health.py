"""Checks the servers of an `HttpSampler`, restarts ours, and readmits those that recover.

    usable --(3 checks unanswered, or a request lost)--> lost
    lost   --(answers, and has or loads the present weights)--> usable
    lost   --(silent for PATIENCE, or can't be started)--> dropped

A dropped server is still checked, and comes back if it answers after all. /health is not used for
checks: it samples a token, which a paused server can't.

Nobody waits for a lost server: its requests go elsewhere (`HttpSampler.servers_changed`), and a
pause doesn't wait until one is back (`stand_aside`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from rljax.engines.http.interfaces import Replicas, Watched
from rljax.engines.http.remote import Remote, ServerLost, describe
from rljax.engines.http.replies import version_of
from rljax.errors import SamplerError, UserError
from rljax.process.tasks import Tasks

log = logging.getLogger(__name__)

INTERVAL = 5.0  # seconds between checks
SILENCE = 3  # unanswered checks in a row until a server is lost
CHECK_TIMEOUT = 20.0  # seconds
PATIENCE = 60.0  # seconds until a silent server that isn't ours is dropped


class Watch:
    def __init__(self, sampler: Watched, remotes: list[Remote], replicas: Replicas | None) -> None:
        self._sampler, self._remotes, self._replicas = sampler, remotes, replicas
        self._check_requested = asyncio.Event()
        self._unanswered: dict[int, int] = {}
        self._lost_since: dict[int, float] = {}
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._returning: set[asyncio.Task[None]] = set()
        self._tasks = Tasks()

    def check_now(self) -> None:
        """Checks the servers now, without waiting for the interval."""
        self._check_requested.set()

    def stand_aside(self) -> None:
        """Gives up bringing servers back for now, and with it the lock `control`.

        Such a server has not proved that it works, so a publish must not wait for it.
        """
        for task in self._returning:
            task.cancel()

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
            self._tasks.cancel()

    async def _check_one(self, index: int) -> None:
        if index in self._restarts:
            return
        why = self._replicas.died(index) if self._replicas is not None else None
        if why is not None:
            self._begin_restart(index, why)
            return
        remote = self._remotes[index]
        try:
            await (self._version_at(remote) if remote.usable else self._return(remote))
        except (ServerLost, SamplerError, UserError) as error:
            self._failed(index, remote, str(error))
        except Exception as error:  # a fault of ours: a server that can't be checked gets no requests, and the others do
            log.exception("the check of %s failed", remote.base)
            self._failed(index, remote, f"{remote.base}: {describe(error)}")
        else:
            self._unanswered[index] = 0
            if remote.usable:
                self._lost_since.pop(index, None)

    async def _version_at(self, remote: Remote) -> int:
        """Asks a server for the version of its weights.

        Raises ServerLost if it doesn't answer, or another program answers in its place.
        """
        info = await remote.get(self._sampler.session, "/get_model_info", CHECK_TIMEOUT)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise ServerLost(f"{remote.base}: /get_model_info answers, but not as a sampling server: {info!r:.100}")
        return version_of(str(info["weight_version"]))

    async def _return(self, remote: Remote) -> None:
        """Makes a server usable again, unless sampling is paused meanwhile.

        Raises if the server doesn't answer or can't load the weights.
        """
        await self._version_at(remote)  # outside the lock: a server that doesn't answer must not delay a publish
        if self._sampler.paused:
            return
        task = asyncio.ensure_future(self._bring_back(remote))
        self._returning.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._returning.discard(task)
            task.cancel()
        if not task.cancelled():
            task.result()

    async def _bring_back(self, remote: Remote) -> None:
        session = self._sampler.session
        async with self._sampler.control:
            if self._sampler.paused:
                return
            if remote.released:  # the same process, for a restarted server is a new Remote
                await self._sampler.reclaim_one(remote)
            if await self._version_at(remote) != self._sampler.version:
                directory = self._sampler.present_weights()
                if directory is None:
                    remote.reason = f"{remote.base}: has other weights than version {self._sampler.version}"
                    remote.behind, remote.dropped = True, False
                    self._sampler.lack_weights()
                    return
                body = {"model_path": directory, "weight_version": str(self._sampler.version), "flush_cache": False}
                await remote.post(session, "/update_weights_from_disk", body, self._sampler.control_timeout)
            await remote.post(session, "/continue_generation", {}, CHECK_TIMEOUT)
            remote.usable, remote.behind, remote.dropped, remote.reason = True, False, False, ""
        log.warning("%s is back", remote.base)
        self._sampler.servers_changed()

    def _failed(self, index: int, remote: Remote, reason: str) -> None:
        self._unanswered[index] = self._unanswered.get(index, 0) + 1
        since = self._lost_since.setdefault(index, time.monotonic())
        if (remote.usable or remote.behind) and self._unanswered[index] >= SILENCE:
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
        self._restarts[index] = self._tasks.start(self._restart(index), f"restart of {remote.base}")

    async def _restart(self, index: int) -> None:
        assert self._replicas is not None
        try:
            remote = await asyncio.to_thread(self._replicas.restart, index)
            remote.lost("has just been restarted")
            self._remotes[index] = remote
        except (
            Exception
        ) as error:  # UserError and ServerLost say why; anything else must not leave a server that nobody restarts
            log.error("%s is dropped: %s", self._remotes[index].base, describe(error))
            self._remotes[index].dropped, self._remotes[index].reason = True, str(error)
            self._sampler.servers_changed()
        finally:
            del self._restarts[index]
            self.check_now()
