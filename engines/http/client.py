"""A sampler that is one or more servers: SGLang's, or ours.

generate --> router --> stream --> completion          a server breaks off, or aborts: the rest is asked of another,
               |                                       behind the tokens that came
pause   -->  shut, then every server pauses in place
load    -->  every server takes the weights; one that doesn't is left out until it has them
resume  -->  every server goes on, then open

who                     waits for                                   who unblocks it
a request               an open router and a usable server          resume, the watch, a publish
a lost server           an answer that names the present version    the watch (health.py)
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import shutil
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rljax.engine import Sampler, Sender, WeightsBroadcast, WeightsInDirectory, WeightSource
from rljax.engines.http import protocol
from rljax.engines.http.continuation import fitted, joined, remaining, shortened
from rljax.engines.http.health import Watch
from rljax.engines.http.interfaces import CONTROL_TIMEOUT, PostTo, Replicas
from rljax.engines.http.published_weights import PublishedWeights
from rljax.engines.http.remote import Remote, ServerLost, describe, session_of
from rljax.engines.http.replies import Reply
from rljax.engines.http.router import Closed, Router
from rljax.errors import RequestLost, SamplerError, UserError
from rljax.types import Completion, Finish, Request

log = logging.getLogger(__name__)

LENT = ("kv_cache", "weights")  # SGLang's names of what is released; its CUDA graphs stay
ABORT_GRACE = 10.0  # seconds that aborted requests get to hand over their tokens when the sampler closes
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0  # seconds


class HttpSampler(Sampler):
    """A `Sampler` of servers that speak SGLang's native protocol.

    Example:
        sampler = HttpSampler([Remote("http://127.0.0.1:30000", facts, token=None)], version=0)
        completion = await sampler.generate(Request("0/17#3", prompt_ids, SamplingParams(64, stop_token_ids=(2,)), seed=1))

    Log-probs are of logits / temperature over the whole vocabulary; SGLang doesn't renormalize for
    top_p and top_k (ours does). SGLang heeds a request's seed only with
    --enable-deterministic-inference, and always ends a completion at the model's own EOS ids,
    unless stop_token_ids is empty: then at none.
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
    ) -> None:
        """
        Args:
          version: of the weights that all of them have.
          request_retries: attempts in a row, after the first, that may bring no token before a
            request is lost.
          recompute: `rollout.recompute_kv_on_publish`.
          lends: the servers' memory, to a learner on their devices.
        """
        self._remotes = list(remotes)
        self.version, self.lends = version, lends
        self._retries, self._recompute, self._replicas = request_retries, recompute, replicas
        self._cache_space = uuid.uuid4().hex  # an earlier run's third weights are not this one's
        self._loads = 0  # begun: a version may be loaded twice, and what was cached between the two be of neither
        self._paused = False
        self._closed = False
        self._published = PublishedWeights()
        self._lacking = asyncio.Event()  # a server is there, and has no weights of the present version to take
        self._attempts: dict[asyncio.Task[None], tuple[Remote, str]] = {}
        self._chores: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._router = Router(self._remotes)
        self.control = asyncio.Lock()  # held while a server is brought back, and to begin a pause
        self._watch: Watch | None = None

    # Requests

    async def generate(self, request: Request) -> Completion:
        """Samples one completion; cancelling the call aborts it at the server. Waits as long as it
        takes: `RetryingGenerator` sets the time limit.

        A completion that loses its server goes on at another, behind the tokens it has. With no
        room left in the context it ends as at max_new_tokens, by `length`.

        Raises:
          UserError: a prompt that is empty, holds an id outside the vocabulary, or leaves no room
            in the context; or whatever else a server refuses.
          RequestLost: too many attempts in a row brought nothing, an answer can't be understood,
            or no server is left.
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
                remote = await self._router.pick(request.id)
            except Closed:
                break
            try:
                rest = fitted(remaining(request, done), remote, len(done.token_ids))
                if rest is None:
                    return dataclasses.replace(done, finish=Finish.LENGTH)
                reply, error = await self._attempt(remote, rest)
            finally:
                self._router.release(remote)
            done = joined(shortened(done, request), reply)
            if error is None and done.finish is not Finish.ABORT:
                return done
            if error is not None:
                self._suspect(remote, error)
            failures = 0 if reply.token_ids else failures + 1
            if failures > self._retries:
                raise SamplerError(f"request {request.id}: lost after {failures} attempts: {error or 'aborted'}") from error
            if failures and not self._closed:
                await asyncio.sleep(min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (failures - 1)) * random.uniform(0.5, 1.5))
        return dataclasses.replace(done, finish=Finish.ABORT)

    async def _attempt(self, remote: Remote, rest: Request) -> tuple[Reply, ServerLost | None]:
        """Asks one server for the rest: what came, and how it was lost if it was."""
        rid = uuid.uuid4().hex  # SGLang aborts by prefix of the id: all are of one length; and each attempt is a new request
        reply = Reply(self.version, remote.facts.overlapped)
        body = protocol.generate_body(
            dataclasses.replace(rest, id=rid),
            cache_key=f"{self._cache_space}/{self._loads}",
            incremental=remote.facts.ours,
            interval=16 if remote.facts.streams_by_request and not remote.facts.ours else None,
        )
        assert self._session is not None
        task = asyncio.ensure_future(remote.generate(self._session, body, reply))
        self._attempts[task] = remote, rid
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            self._chore(self._abort(remote, rid))
            raise
        finally:
            del self._attempts[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ServerLost):
            raise error
        return reply, error

    def _suspect(self, remote: Remote, error: ServerLost) -> None:
        """Whether it is really gone, the watch finds out; until then nothing is sent there."""
        if remote.usable:
            log.warning("%s is left out: %s", remote.base, error)
            remote.lost(str(error))
            self._router.wake()
        if self._watch is not None:
            self._watch.hurry()

    async def _abort(self, remote: Remote, rid: str) -> None:
        assert self._session is not None
        try:
            await remote.post(self._session, "/abort_request", {"rid": rid}, 30.0)
        except (ServerLost, UserError) as error:
            log.debug("abort of %s: %s", rid, error)

    # Weights

    async def pause(self) -> None:
        """Stops sending requests, and every server between two decode steps.

        Raises SamplerError when no server is left.
        """
        self._enter()
        self._router.set_open(False)
        async with self.control:  # a server that is being brought back comes first
            self._paused = True
        await self._each(self._pause_one, self._usable())

    async def _pause_one(self, remote: Remote) -> None:
        session = self._session
        assert session is not None
        await remote.post(session, "/pause_generation", {"mode": self._pause_mode(remote)}, CONTROL_TIMEOUT)
        # SGLang acknowledges a pause before its scheduler has seen it; the scheduler answers this, behind it in the queue.
        await remote.get(session, "/get_server_info", CONTROL_TIMEOUT)

    def _pause_mode(self, remote: Remote) -> str:
        """Where an old server can't recompute the cache of what it runs, that is aborted, and
        submitted again by `generate`.
        """
        if not self._recompute:
            return "in_place"
        return "retract" if remote.facts.retracts else "abort"

    def _flushes(self, remote: Remote) -> bool:
        """A retracted request still owns its prefix in SGLang's cache.

        In no other mode may its cache be flushed at all.
        """
        return self._recompute and remote.facts.retracts

    async def resume(self) -> None:
        self._enter()
        self._paused = False
        try:
            await self._each(lambda remote: self._post(remote, "/continue_generation", {}), self._usable())
        finally:
            self._router.set_open(True)

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """Puts weights on every server, pausing around it unless they are paused. A server that
        doesn't take them is left out until it does.

        No stale cache: SGLang keeps the cache of older weights for requests in flight. Later
        requests use another key, and can't find it.

        Raises:
          UserError: weights that no server accepts, or that are arrays of this process.
          SamplerError: when no server is left.
        """
        self._enter()
        paused = self._paused
        if not paused:
            await self.pause()
        self._loads += 1
        try:
            self._usable()
            remotes = [remote for remote in self._remotes if remote.usable or remote.behind]  # in their order: ipc goes by it
            match source:
                case WeightsInDirectory(directory):
                    current = await self._load_directory(directory, remotes, version)
                case WeightsBroadcast(sender):
                    current = await self._broadcast(sender, remotes, version)
                    await asyncio.to_thread(self._published.drop)
                case _:
                    raise UserError("a server takes weights from a directory or a broadcast, not arrays of this process")
            self.version = version
            self._lacking.clear()
            for remote in current:
                remote.usable, remote.behind = True, False
        finally:
            if not paused:
                await self.resume()

    async def lacks_weights(self) -> None:
        """Returns when a server that was started again waits for weights that only a publish can
        bring.
        """
        await self._lacking.wait()

    async def _load_directory(self, directory: Path, remotes: Sequence[Remote], version: int) -> list[Remote]:
        try:
            prepared = await asyncio.to_thread(self._published.prepare, directory, version)
        except OSError as error:
            raise UserError(f"{directory}: weights can't be read: {error}") from error
        try:
            current = await self._each(lambda remote: self._load_one(remote, str(directory), version), remotes)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, prepared, ignore_errors=True)
            raise
        await asyncio.to_thread(self._published.hold, prepared, version)
        return current

    async def _load_one(self, remote: Remote, directory: str, version: int) -> None:
        body = {"model_path": directory, "weight_version": str(version), "flush_cache": self._flushes(remote)}
        await self._post(remote, "/update_weights_from_disk", body)

    async def _broadcast(self, sender: Sender, remotes: Sequence[Remote], version: int) -> list[Remote]:
        if not remotes:
            raise SamplerError(f"publishing version {version}: no server is there to take part in the broadcast")
        try:
            posts = [PostTo(self.session, remote, remote.member) for remote in remotes]
            await sender.send(posts, version, flush=all(map(self._flushes, remotes)))
        except ServerLost as error:
            raise SamplerError(f"publishing version {version}: {error}") from error
        return list(remotes)

    async def _post(self, remote: Remote, path: str, body: dict[str, Any]) -> Any:
        assert self._session is not None
        return await remote.post(self._session, path, body, CONTROL_TIMEOUT)

    async def _each(self, act: Callable[[Remote], Awaitable[Any]], remotes: Sequence[Remote]) -> list[Remote]:
        """Acts on all servers at once, and returns those that did it. One that fails is left out;
        where nobody agrees, it is the request that is wrong.
        """
        results = await asyncio.gather(*(act(remote) for remote in remotes), return_exceptions=True)
        failed = {r: e for r, e in zip(remotes, results, strict=True) if isinstance(e, BaseException)}
        for error in failed.values():
            if not isinstance(error, ServerLost | UserError):
                raise error
        refused = [error for error in failed.values() if isinstance(error, UserError)]
        if refused and len(failed) == len(remotes):
            raise refused[0]
        for remote, error in failed.items():
            self._suspect(remote, ServerLost(str(error)))
        return [remote for remote in remotes if remote not in failed]

    def _usable(self) -> list[Remote]:
        """May be none, while one is expected back: the watch gives it the present weights."""
        if all(remote.dropped for remote in self._remotes):
            raise SamplerError("no server is left: " + "; ".join(remote.reason for remote in self._remotes))
        return [remote for remote in self._remotes if remote.usable]

    # Memory

    async def release(self) -> None:
        """Aborts what is in flight, which `generate` submits again after the next resume: SGLang
        dies when it is asked with a request running. Then every server lets go of its weights and
        its cache (SGLang: only with --enable-memory-saver).
        """
        self._enter()
        self._router.set_open(False)
        async with self.control:
            self._paused = True
        await self._each(self._release_one, self._usable())

    async def _release_one(self, remote: Remote) -> None:
        await self._post(remote, "/pause_generation", {"mode": "abort"})
        await remote.get(self.session, "/get_server_info", CONTROL_TIMEOUT)  # behind the aborts, in the scheduler's queue
        remote.released = True
        await self._post(remote, "/release_memory_occupation", {"tags": list(LENT)})

    async def reclaim(self) -> None:
        """The servers have their memory again, and stay paused."""
        self._enter()
        await self._each(self.reclaim_one, self._usable())

    async def reclaim_one(self, remote: Remote) -> None:
        await self._post(remote, "/resume_memory_occupation", {"tags": list(LENT)})
        remote.released = False

    # Life

    def _enter(self) -> None:
        """Sockets and tasks belong to an event loop: the first call in one makes them."""
        if self._closed:
            raise SamplerError("the sampler is closed")
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop, self._session = loop, session_of()
        is_open = self._router.is_open
        self._router = Router(self._remotes)
        self._router.set_open(is_open)
        self.control = asyncio.Lock()
        self._watch = Watch(self, self._remotes, self._replicas)
        self._chore(self._watch.run())

    def _chore(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    @property
    def paused(self) -> bool:
        return self._paused

    def present_weights(self) -> str | None:
        """A directory with the present weights, for a server that was started again; None when
        there is none.
        """
        return self._published.directory_of(self.version)

    def lack_weights(self) -> None:
        """The watch found a server to which nothing held can be given."""
        self._lacking.set()

    def servers_changed(self) -> None:
        """The watch found a server back, or gone."""
        self._router.wake()

    async def close(self) -> None:
        """Ends every request with finish `abort`, keeping its tokens so far; stops servers that we
        started. May be repeated.
        """
        if self._closed:
            return
        self._closed = True
        self._router.close()
        if self._loop is asyncio.get_running_loop():
            await self._end_requests()
            for chore in tuple(self._chores):
                chore.cancel()
            await asyncio.gather(*self._chores, return_exceptions=True)
            await self.session.close()
        await asyncio.to_thread(self._published.drop)
        if self._replicas is not None:
            await asyncio.to_thread(self._replicas.close)

    async def _end_requests(self) -> None:
        """SGLang ends an aborted request at its next step, so servers that we paused have to go
        on.
        """
        await asyncio.gather(*(self._abort(remote, rid) for remote, rid in tuple(self._attempts.values())))
        if self._paused:
            paused = [remote for remote in self._remotes if remote.usable]
            going = (self._post(remote, "/continue_generation", {}) for remote in paused)
            for error in await asyncio.gather(*going, return_exceptions=True):
                if isinstance(error, BaseException):
                    log.warning("a server stays paused: %s", describe(error))
        if self._attempts:
            await asyncio.wait(tuple(self._attempts), timeout=ABORT_GRACE)
        for task in tuple(self._attempts):
            task.cancel()
