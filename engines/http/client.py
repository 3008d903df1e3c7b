"""A sampler that is one or more servers: SGLang's, or ours.

generate --> router --> stream --> completion
               |        (a server that aborts or breaks off: another one continues behind
               |         the tokens that have arrived)
pause   -->  close the router, then pause every server in place
load    -->  load the weights on every server; one that fails gets no requests until it has them
resume  -->  resume every server, then open the router

who              waits for                                   who unblocks it
a request        an open router and a usable server          resume, the watch, a publish
a call           its server                                  the server, its time limit, or the
                                                             watch, which calls the server lost
a lost server    an answer that names the present version    the watch (health.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
import uuid
from collections.abc import Sequence

import aiohttp
import numpy as np

from rljax import tracing
from rljax.engine import Sampler, WeightSource
from rljax.engines.http import protocol
from rljax.engines.http.calls import Calls
from rljax.engines.http.continuation import fitted, joined, remaining, shortened
from rljax.engines.http.health import Watch
from rljax.engines.http.interfaces import Replicas
from rljax.engines.http.publishing import Publishing
from rljax.engines.http.remote import Remote, ServerLost, ServerOwned, describe, make_session
from rljax.engines.http.replies import Reply
from rljax.engines.http.router import Closed, Router
from rljax.errors import RequestLost, SamplerError, UserError
from rljax.process.tasks import Tasks
from rljax.types import Completion, Finish, Request

log = logging.getLogger(__name__)

MEMORY_TAGS = ("kv_cache", "weights")  # SGLang's names of the memory that is released; its CUDA graphs stay
CONTROL_TIMEOUT = 450.0  # seconds for a pause, a load or a resume, if the config doesn't say
OWNER_PATIENCE = 40.0  # seconds to wait for a server that belongs to another run, which may have been killed
ABORT_GRACE = 10.0  # seconds for aborted requests to return their tokens when the sampler closes
ABORT_TIMEOUT = 30.0  # seconds for the abort of one request
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0  # seconds


class HttpSampler(Sampler):
    """Client of servers that speak SGLang's native protocol; implements `Sampler`.

    Example:
        sampler = HttpSampler([Remote("http://127.0.0.1:30000", info, token=None)], version=0)
        request = Request("0/17#3", prompt_ids, SamplingParams(64, stop_token_ids=(2,)), seed=1)
        completion = await sampler.generate(request)

    Log-probs are those of logits / temperature over the whole vocabulary: SGLang doesn't
    renormalize for top_p and top_k (ours does). SGLang uses a request's seed only with
    --enable-deterministic-inference. It always ends a completion at the model's own EOS ids, unless
    stop_token_ids is empty; then no token ends it.
    """

    version = 0

    def __init__(
        self,
        remotes: Sequence[Remote],
        *,
        version: int,
        request_retries: int = 3,
        recompute: bool = False,
        replicas: Replicas | None = None,
        lends: bool = False,
        control_timeout: float = CONTROL_TIMEOUT,
    ) -> None:
        """Makes the sampler; connects at the first call.

        Args:
          version: version of the weights on all usable servers.
          request_retries: retries in a row that may bring no token before a request is lost.
          recompute: `rollout.recompute_kv_on_publish`.
          replicas: restarts servers that we started; None for servers that others run.
          lends: True if the servers lend their memory to a learner on the same devices.
          control_timeout: seconds for a pause, a load or a resume.
        """
        self._remotes = list(remotes)
        self.version, self.lends, self.control_timeout = version, lends, control_timeout
        self._retries, self._replicas = request_retries, replicas
        self._calls = Calls(self._remotes, control_timeout, self._suspect)
        self._publishing = Publishing(self._calls, recompute=recompute)
        self._cache_space = uuid.uuid4().hex  # another run's cache keys must not match ours
        self._loads = 0  # loads begun; part of the cache key, for a version may be loaded twice
        self._paused = False
        self._closed = False
        self._lacking = asyncio.Event()  # set while a server waits for weights that only a publish can bring
        self._attempts: dict[asyncio.Task[None], tuple[Remote, str]] = {}
        self._background = Tasks(self._broke)
        self._fault: Exception | None = None  # that ended a task of ours
        self._loop: asyncio.AbstractEventLoop | None = None
        self._router = Router(self._remotes)
        self.control = asyncio.Lock()  # locked while a server is brought back, and to begin a pause
        self._watch: Watch | None = None

    @property
    def memory_peak(self) -> int | None:
        return max((remote.info.memory for remote in self._remotes if remote.info.memory is not None), default=None)

    # Requests

    async def generate(self, request: Request) -> Completion:
        """Samples one completion; cancelling the call aborts it at the server.

        Waits without a limit: `RetryingGenerator` sets one. A completion whose server is lost
        continues on another, behind the tokens it has. If no room is left in the context, it ends
        by `length`, as at max_new_tokens.

        Raises:
          UserError: the prompt is empty, holds an id outside the vocabulary or leaves no room in
            the context (PromptTooLong), or a server refuses the request.
          RequestLost: too many attempts in a row brought nothing, a reply is malformed, or no
            server is left.
        """
        self._enter()
        try:
            return await self._complete(request)
        except SamplerError as error:
            raise RequestLost(str(error)) from error

    async def _complete(self, request: Request) -> Completion:
        if not len(request.prompt_ids):
            raise UserError(f"request {request.id}: the prompt is empty; a sampler needs at least one token")
        done = Completion(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), Finish.ABORT)
        failures = 0
        while not self._closed:
            try:
                with tracing.wait("wait for a server"):
                    remote = await self._router.pick(request.id)
            except Closed:
                self._raise_fault()
                break
            try:
                rest = fitted(remaining(request, done), remote, len(done.token_ids))
                if rest is None:
                    return dataclasses.replace(done, finish=Finish.LENGTH)
                with tracing.span(f"server {remote.base}", requests=remote.load):
                    reply, error = await self._attempt(remote, rest)
            finally:
                self._router.release(remote)
            done = joined(shortened(done, request), reply)
            if error is None and done.finish is not Finish.ABORT:
                return done
            if self._is_closed():
                break
            if error is not None:
                self._suspect(remote, error)
            failures = 0 if reply.token_ids else failures + 1
            if failures > self._retries:
                raise SamplerError(f"request {request.id}: lost after {failures} attempts: {error or 'aborted'}") from error
            if failures:
                await asyncio.sleep(min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (failures - 1)) * random.uniform(0.5, 1.5))
        return dataclasses.replace(done, finish=Finish.ABORT)

    def _is_closed(self) -> bool:
        return self._closed

    async def _attempt(self, remote: Remote, rest: Request) -> tuple[Reply, ServerLost | None]:
        """Asks one server for the rest. Returns what arrived, and the loss of the server or None."""
        rid = uuid.uuid4().hex  # one length, for SGLang aborts by prefix; a new id per attempt
        reply = Reply(self.version, remote.info.overlapped, len(rest.prompt_ids) if rest.pictures else None)
        body = protocol.generate_body(
            dataclasses.replace(rest, id=rid),
            cache_key=f"{self._cache_space}/{self._loads}",
            incremental=remote.info.ours,
            interval=16 if remote.info.streams_by_request and not remote.info.ours else None,
        )
        task = asyncio.ensure_future(remote.generate(self.session, body, reply))
        self._attempts[task] = remote, rid
        try:
            await self._calls.unless_lost(remote, task)
        except ServerLost as error:
            return reply, error
        except asyncio.CancelledError:
            self._background.start(self._abort(remote, rid), f"abort of {rid}")
            raise
        finally:
            del self._attempts[task]
        return reply, None

    def _suspect(self, remote: Remote, error: ServerLost) -> None:
        """Stops sending requests to a server; the watch finds out whether it is really gone."""
        if remote.usable:
            log.warning("%s gets no more requests: %s", remote.base, error)
            remote.lost(str(error))
            self.servers_changed()
        if self._watch is not None:
            self._watch.check_now()

    async def _abort(self, remote: Remote, rid: str) -> None:
        try:
            await remote.post(self.session, "/abort_request", {"rid": rid}, ABORT_TIMEOUT)
        except (ServerLost, UserError) as error:
            log.debug("abort of %s: %s", rid, error)

    # Weights

    async def pause(self) -> None:
        """Stops sending requests, and pauses every server between two decode steps.

        Raises SamplerError if no server is left, UserError if they belong to another run. One that
        was killed is forgotten by a server after a while, which this waits for.
        """
        self._enter()
        await self._close_router()
        until = time.monotonic() + OWNER_PATIENCE
        while True:
            try:
                await self._calls.each(self._pause_one, self._calls.usable())
                return
            except ServerOwned:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(OWNER_PATIENCE / 40)

    async def _close_router(self) -> None:
        """Stops sending requests. A server that is being brought back is left out."""
        self._router.set_open(False)
        if self._watch is not None:
            self._watch.stand_aside()
        async with self.control:
            self._paused = True

    async def _pause_one(self, remote: Remote) -> None:
        await self._calls.post(remote, "/pause_generation", {"mode": self._publishing.pause_mode(remote)})
        # SGLang acknowledges a pause before its scheduler has seen it. The scheduler answers this request after the pause.
        await self._calls.get(remote, "/get_server_info")

    async def resume(self) -> None:
        self._enter()
        self._paused = False
        try:
            await self._calls.each(lambda remote: self._calls.post(remote, "/continue_generation", {}), self._calls.usable())
        finally:
            self._router.set_open(True)

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """Loads weights on every server, pausing them meanwhile.

        A server that fails gets no requests until it has them. No stale cache: SGLang keeps the
        cache of older weights for requests in flight, but later requests use another cache key and
        can't find it.

        Raises:
          UserError: no server accepts the weights, or they are arrays of this process.
          SamplerError: no server is left.
        """
        self._enter()
        paused = self._paused
        if not paused:
            await self.pause()
        self._loads += 1
        try:
            self._calls.usable()
            remotes = [remote for remote in self._remotes if remote.usable or remote.behind]  # ipc relies on their order
            current = await self._publishing.load(source, remotes, version)
            self.version = version
            self._lacking.clear()
            for remote in current:
                remote.usable, remote.behind = True, False
        finally:
            if not paused:
                await self.resume()

    async def lacks_weights(self) -> None:
        """Returns when a restarted server waits for weights that only a publish can bring."""
        await self._lacking.wait()

    # Memory

    async def release(self) -> None:
        """Aborts requests in flight and makes every server free its weights and its cache.

        SGLang dies if it is asked while a request is running, and it needs --enable-memory-saver.
        `generate` submits the rest of each aborted request after the next resume.
        """
        self._enter()
        await self._close_router()
        await self._calls.each(self._release_one, self._calls.usable())

    async def _release_one(self, remote: Remote) -> None:
        await self._calls.post(remote, "/pause_generation", {"mode": "abort"})
        await self._calls.get(remote, "/get_server_info")  # answered by the scheduler after the aborts
        remote.released = True
        await self._calls.post(remote, "/release_memory_occupation", {"tags": list(MEMORY_TAGS)})

    async def reclaim(self) -> None:
        """Makes the servers allocate their memory again. They stay paused."""
        self._enter()
        await self._calls.each(self.reclaim_one, self._calls.usable())

    async def reclaim_one(self, remote: Remote) -> None:
        await self._calls.post(remote, "/resume_memory_occupation", {"tags": list(MEMORY_TAGS)})
        remote.released = False

    # Lifecycle

    def _enter(self) -> None:
        """Makes the sockets and tasks at the first call in an event loop, to which they belong."""
        if self._closed:
            raise SamplerError("the sampler is closed")
        self._raise_fault()
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop, self._calls.session = loop, make_session()
        is_open = self._router.is_open
        self._router = Router(self._remotes)
        self._router.set_open(is_open)
        self.control = asyncio.Lock()
        self._watch = Watch(self, self._remotes, self._replicas)
        self._background.start(self._watch.run(), "watch over the servers")

    def _broke(self, error: Exception) -> None:
        """Fails all requests: without the watch a lost server would be waited for."""
        self._fault = error
        for remote in self._remotes:
            remote.lost("nobody watches over it")
        self._router.close()
        self.servers_changed()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise SamplerError(f"the watch over the servers ended: {describe(self._fault)}") from self._fault

    @property
    def session(self) -> aiohttp.ClientSession:
        return self._calls.session

    @property
    def paused(self) -> bool:
        return self._paused

    def present_weights(self) -> str | None:
        """Returns a directory with the present weights for a restarted server, or None."""
        return self._publishing.directory_of(self.version)

    def lack_weights(self) -> None:
        """Notes that a server needs weights that only a publish can bring. Called by the watch."""
        self._lacking.set()

    def servers_changed(self) -> None:
        """Wakes waiting requests, and ends the calls to servers that are lost by now."""
        self._calls.end_lost()
        self._router.wake()

    async def close(self) -> None:
        """Ends all requests with finish `abort`, keeping their tokens.

        Stops the servers that we started. May be called twice.
        """
        if self._closed:
            return
        self._closed = True
        self._router.close()
        if self._loop is asyncio.get_running_loop():
            await self._end_requests()
            await asyncio.gather(*map(self._release_ownership, self._remotes))
            await self._background.close()
            await self.session.close()
        await self._publishing.drop()
        if self._replicas is not None:
            await asyncio.to_thread(self._replicas.close)

    async def _release_ownership(self, remote: Remote) -> None:
        if remote.usable and remote.info.ours:
            with contextlib.suppress(ServerLost, UserError):  # it forgets a silent run anyway
                await remote.post(self.session, "/release_ownership", {}, ABORT_TIMEOUT)

    async def _end_requests(self) -> None:
        """Aborts all requests at their servers and waits for their tokens.

        SGLang ends an aborted request at its next step, so paused servers are resumed first.
        """
        await asyncio.gather(*(self._abort(remote, rid) for remote, rid in tuple(self._attempts.values())))
        if self._paused:
            paused = [remote for remote in self._remotes if remote.usable]
            going = (self._calls.post(remote, "/continue_generation", {}) for remote in paused)
            for error in await asyncio.gather(*going, return_exceptions=True):
                if isinstance(error, BaseException):
                    log.warning("a server stays paused: %s", describe(error))
        if self._attempts:
            await asyncio.wait(tuple(self._attempts), timeout=ABORT_GRACE)
        for task in tuple(self._attempts):
            task.cancel()
