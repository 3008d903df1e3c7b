"""The sampler's loop, in a thread of its own: admit, prefill, decode, collect.

    generate --> inbox --> waiting --> slot and pages --> prefilled --> decoding --> completion
                              ^                                            |   stop id or string,
                              |                                            |   limit or abort
                              +---- no page left: the youngest goes back --+
                              +---- publish with recompute_kv_on_publish --+

Prompts are prefilled first, so that a decode step is as full as it can be: it costs about the same
however many take part. Where nearly all slots could decode, prefill and decode dispatches
alternate, so that a long prompt stalls nobody; and after PATIENCE prefill dispatches in a row
those that could decode have their turn in any case. Requests, pauses and weight swaps come through
one inbox and are looked at between dispatches.

A request that goes back keeps its tokens, and is prefilled behind them when there is room again.
The one that arrived first never has to, so that some request always gets on.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rljax.engine import WeightSource
from rljax.engines.jax.sampling.orders import HALT, ORDER, START, Decoded
from rljax.engines.jax.sampling.programs import Programs
from rljax.engines.jax.sampling.slots import SlotTable, Tenant, Work
from rljax.errors import SamplerError
from rljax.types import Completion, Finish

log = logging.getLogger(__name__)

FEW = 8  # prefill takes turns with decoding while it is of at most one slot to so many that decode
PATIENCE = 16  # prefill dispatches in a row while some slot could decode

Scorer = Callable[[Any, Sequence[np.ndarray]], Sequence[np.ndarray]]
"""(weights, sequences of T token ids) -> their log-probs, [T] float32, nats, at the temperature of the run."""


@dataclasses.dataclass
class Command:
    """Something to do between two dispatches."""

    act: Callable[[], None]
    future: concurrent.futures.Future[None] = dataclasses.field(default_factory=concurrent.futures.Future)


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A decode dispatch whose tokens have not been read yet."""

    drawn: Decoded
    version: int
    tenants: dict[int, Tenant]


@dataclasses.dataclass(frozen=True)
class SamplerStats:
    """Counts since the start, and what goes on now."""

    generated_tokens: int
    prompt_tokens: int
    prefilled_tokens: int  # less than prompt_tokens where prefixes were shared
    running: int  # requests in slots
    waiting: int  # requests without one
    preemptions: int  # times that a request gave up its pages
    waited: float  # seconds that the scheduler spent waiting for tokens of the device


class Scheduler:
    """Owns programs and slots; everything but `submit`, `command` and `stats` runs in its thread."""

    def __init__(
        self, programs: Programs, *, recompute: bool, ahead: int, scorer: Scorer | None = None, scored_temperature: float = 1.0
    ) -> None:
        """Starts the thread.

        Args:
          recompute: `rollout.recompute_kv_on_publish`.
          ahead: decode dispatches sent before the oldest is read; 1 hides the host's work behind a
            device's.
          scorer: of `jax.bitwise`: its log-probs replace those of sampling when a completion ends.
        """
        self.version = 0
        self._scorer, self._scored_temperature = scorer, scored_temperature
        self._programs, self._recompute, self._ahead = programs, recompute, ahead
        self._table = SlotTable(
            programs.slots, programs.context, page_size=programs.page_size, pages=programs.pages, shards=programs.shards
        )
        self._inbox: queue.SimpleQueue[Work | Command] = queue.SimpleQueue()
        self._waiting: collections.deque[Work] = collections.deque()
        self._decoding: dict[int, Tenant] = {}  # what the device has in its slots
        self._dispatched: collections.deque[Dispatch] = collections.deque()
        self._prefills = 0  # dispatches since the last decode
        self._paused = False
        self._lent = False  # the cache that was is gone
        self._some_cancelled = False  # since they were last dropped
        self._ended: BaseException | None = None  # why nothing runs any more
        self._lock = threading.Lock()  # nothing enters the inbox after the thread has emptied it for the last time
        self._waited = 0.0
        self._arrived = self._generated = self._prompted = self._prefilled = self._preemptions = 0
        self._thread = threading.Thread(target=self._run, name="rljax-sampler", daemon=True)
        self._thread.start()

    # From any thread

    def submit(self, work: Work) -> concurrent.futures.Future[Completion]:
        work.future.add_done_callback(self._note_cancelled)
        self._put(work)
        return work.future

    def _note_cancelled(self, future: concurrent.futures.Future[Completion]) -> None:
        if future.cancelled():
            self._some_cancelled = True

    def command(self, act: Callable[[], None]) -> concurrent.futures.Future[None]:
        command = Command(act)
        self._put(command)
        return command.future

    def _put(self, item: Work | Command) -> None:
        with self._lock:
            if self._ended is not None:
                raise SamplerError(f"the sampler has ended: {self._ended}") from self._ended
            self._inbox.put(item)

    def close(self) -> None:
        """Ends every request with finish `abort`; returns when the thread is gone."""
        with self._lock:
            if self._ended is None:
                self._inbox.put(Command(self._stop))
        self._thread.join()

    def stats(self) -> SamplerStats:
        return SamplerStats(
            generated_tokens=self._generated,
            prompt_tokens=self._prompted,
            prefilled_tokens=self._prefilled,
            running=len(self._table.occupied),
            waiting=len(self._waiting) + self._inbox.qsize(),
            preemptions=self._preemptions,
            waited=self._waited,
        )

    # Commands: run in the thread, when nothing is dispatched

    def pause(self) -> None:
        self._programs.wait()
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def load(self, source: WeightSource, version: int) -> None:
        self._programs.load(source)
        self.version = version
        self._waiting.extendleft(reversed(self._table.swap(self._recompute or self._lent)))
        self._lent = False

    def release(self) -> None:
        """Stays paused, and must not be resumed before `reclaim` and `load`: what is in flight is
        prefilled again then.
        """
        self.pause()
        self._programs.lend()
        self._lent = True

    def reclaim(self) -> None:
        self._programs.reclaim()

    def _stop(self) -> None:
        self._ended = SamplerError("closed")

    # The thread

    def _run(self) -> None:
        try:
            while self._ended is None:
                self._receive()
                if not self._paused and self._ended is None:
                    self._step()
            self._abort_all()
        except BaseException as error:
            self._fail_all(error)
            raise
        finally:
            self._programs.free()

    def _step(self) -> None:
        """One dispatch, or the tokens of one."""
        self._drop_cancelled()
        while self._waiting and self._table.admit(self._waiting[0]):
            self._waiting.popleft()
        if copies := self._table.copies(self._programs.copies):
            self._programs.copy(copies)
        if not self._decode_is_due() and (chunk := self._table.chunk(self._programs.shapes)):
            self._prefilled += int(chunk.counts.sum())
            self._programs.prefill(chunk)
            self._prefills += 1
            if self._table.filling:
                return
        self._prefills = 0
        sent = self._decode()
        if len(self._dispatched) > (self._ahead if sent else 0):
            self._collect(self._dispatched.popleft())

    def _receive(self) -> None:
        """Takes in what has arrived; waits for something where there is nothing to do."""
        idle = self._paused or not (self._table.occupied or self._dispatched or self._waiting)
        while idle or not self._inbox.empty():
            item = self._inbox.get()
            idle = False
            if isinstance(item, Work):
                if item.future.cancelled():  # perhaps before the last search for those that are
                    continue
                item.arrival = self._arrived
                self._arrived += 1
                self._prompted += len(item.request.prompt_ids)
                self._waiting.append(item)
                continue
            self._collect_all()
            try:
                item.act()
            except Exception as error:  # the command's own: a missing file, weights of another model
                reject(item.future, error)
            else:
                resolve(item.future, None)

    def _drop_cancelled(self) -> None:
        if not self._some_cancelled:
            return
        self._some_cancelled = False  # before the search: one that is cancelled during it is dropped in the next
        for tenant in self._table.occupied:
            if tenant.work.future.cancelled():
                self._table.release(tenant)
        if any(work.future.cancelled() for work in self._waiting):
            self._waiting = collections.deque(work for work in self._waiting if not work.future.cancelled())

    def _decode_is_due(self) -> bool:
        """Returns whether slots that could decode have waited for prefill long enough."""
        filling, occupied = len(self._table.filling), len(self._table.occupied)
        ready = occupied - filling
        return self._prefills > 0 and ready > 0 and (ready >= FEW * filling or self._prefills >= PATIENCE)

    def _decode(self) -> bool:
        """Sends the next decode dispatch, if some slot has its prompt in the cache and tokens to
        come.
        """
        tenants = self._ready()
        if not tenants:
            return False
        orders = np.zeros(self._programs.slots, ORDER)
        for slot, tenant in self._decoding.items():
            if tenants.get(slot) is not tenant:
                orders[slot]["action"] = HALT
        for slot, tenant in tenants.items():
            if self._decoding.get(slot) is not tenant:
                orders[slot] = self._order(tenant)
        self._decoding = tenants
        plain = all(tenant.work.plain for tenant in tenants.values())
        drawn = self._programs.decode(orders, self._table.tables, self._table.groups(list(tenants)), plain)
        self._dispatched.append(Dispatch(drawn, self.version, tenants))
        return True

    def _ready(self) -> dict[int, Tenant]:
        """Tenants that have been prefilled, by slot, with pages for another dispatch; empty if none
        of them has tokens to come.

        Where pages run out, those that draw are waited for, because some may end; then the
        youngest goes back to wait.
        """
        while True:
            filling = set(self._table.filling)
            tenants = {tenant.slot: tenant for tenant in self._table.occupied if tenant not in filling}
            pending = collections.Counter(
                tenant
                for dispatch in self._dispatched
                for slot, tenant in dispatch.tenants.items()
                if tenants.get(slot) is tenant
            )
            short, going = None, False
            for tenant in tenants.values():
                drawn = self._programs.decode_steps * pending[tenant]
                if tenant.work.emitted + drawn < tenant.work.limit:
                    going = True
                    needed = int(self._table.length[tenant.slot]) - 1 + drawn + self._programs.decode_steps
                    if not self._table.grow(tenant, min(needed, tenant.last)):
                        short = tenant
                        break
            if short is None:
                return tenants if going else {}
            if self._dispatched:
                self._collect_all()
            else:
                self._preempt(self._table.youngest(short))

    def _preempt(self, tenant: Tenant) -> None:
        self._table.release(tenant)
        self._waiting.appendleft(tenant.work)
        self._preemptions += 1

    def _order(self, tenant: Tenant) -> np.ndarray:
        work, params = tenant.work, tenant.work.request.params
        order = np.zeros((), ORDER)
        last = int(self._table.length[tenant.slot]) - 1
        order["action"], order["token"], order["position"] = START, self._table.tokens[tenant.slot, last], last
        order["limit"], order["token_index"] = work.limit, work.emitted
        order["seed"] = np.uint32(work.request.seed % 2**32).view(np.int32)
        order["min_new_tokens"], order["top_k"], order["greedy"] = params.min_new_tokens, params.top_k, params.greedy
        order["temperature"], order["top_p"] = params.temperature, params.top_p
        order["stop_ids"] = self._programs.spec.vocab_size  # an id that nothing draws
        order["stop_ids"][: len(params.stop_token_ids)] = params.stop_token_ids
        return order

    def _collect_all(self) -> None:
        while self._dispatched:
            self._collect(self._dispatched.popleft())

    def _collect(self, dispatch: Dispatch) -> None:
        """Waits for a dispatch and hands out its tokens."""
        start = time.perf_counter()
        tokens, logp = np.asarray(dispatch.drawn.tokens), np.asarray(dispatch.drawn.logp)
        self._waited += time.perf_counter() - start
        counts = (tokens >= 0).sum(axis=0).tolist()
        ended = []
        for slot, tenant in dispatch.tenants.items():
            count = counts[slot]
            if self._table.tenants[slot] is tenant and count:
                finish = self._take(tenant, tokens[:count, slot], logp[:count, slot], dispatch.version)
                if finish is not None:
                    self._table.release(tenant)
                    ended.append((tenant.work, tenant.work.completion(finish)))
        for work, completion in self._rescored(ended):
            resolve(work.future, completion)

    def _take(self, tenant: Tenant, tokens: np.ndarray, logp: np.ndarray, version: int) -> Finish | None:
        """Adds tokens to a completion, as far as they belong to it, and says whether that ended
        it.
        """
        work, params = tenant.work, tenant.work.request.params
        finish = None
        if work.stops is not None:
            for count, token in enumerate(tokens.tolist(), 1):
                if work.stops.push(token) and work.emitted + count >= params.min_new_tokens:
                    tokens, logp, finish = tokens[:count], logp[:count], Finish.STOP
                    break
        work.append(tokens, logp, version)
        self._generated += len(tokens)
        self._table.extend(tenant, tokens)
        if int(tokens[-1]) in params.stop_token_ids:
            finish = Finish.STOP
        if finish is None and work.emitted >= work.limit:
            finish = Finish.LENGTH
        return finish

    def _rescored(self, ended: list[tuple[Work, Completion]]) -> list[tuple[Work, Completion]]:
        """Replaces log-probs by the scorer's, for completions of the distribution it scores.

        That is the whole softmax at the run's temperature, under the present weights. Other
        completions keep what sampling gave.
        """
        if self._scorer is None:
            return ended
        exact = [i for i, (work, completion) in enumerate(ended) if self._is_scorable(work, completion)]
        sequences = [np.concatenate([ended[i][0].request.prompt_ids, ended[i][1].token_ids]) for i in exact]
        for i, scores in zip(exact, self._scorer(self._programs.params, sequences) if exact else (), strict=True):
            work, completion = ended[i]
            logp = np.asarray(scores[len(work.request.prompt_ids) :], np.float32)
            ended[i] = work, dataclasses.replace(completion, logp=logp)
        return ended

    def _is_scorable(self, work: Work, completion: Completion) -> bool:
        params = work.request.params
        whole = not params.greedy and params.top_p == 1 and params.top_k == 0 and params.min_new_tokens == 0
        return whole and params.temperature == self._scored_temperature and bool(np.all(completion.versions == self.version))

    def _abort_all(self) -> None:
        for work in self._close_inbox(SamplerError("closed")):
            resolve(work.future, work.completion(Finish.ABORT))

    def _fail_all(self, error: BaseException) -> None:
        for work in self._close_inbox(error):
            lost = SamplerError(f"request {work.request.id}: the sampler failed: {type(error).__name__}: {error}")
            lost.__cause__ = error
            reject(work.future, lost)

    def _close_inbox(self, why: BaseException) -> Sequence[Work]:
        """Takes all requests that wait, and fails commands that wait.

        Nothing is accepted from here on."""
        with self._lock:
            self._ended = why
        works = [tenant.work for tenant in self._table.occupied] + list(self._waiting)
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Work):
                works.append(item)
            else:
                reject(item.future, SamplerError(f"the sampler has ended: {why}"))
        for tenant in self._table.occupied:
            self._table.release(tenant)
        self._waiting.clear()
        return works


def resolve(future: concurrent.futures.Future[Any], result: Any) -> None:
    """Unless the caller has cancelled it, now or a moment ago."""
    try:
        future.set_result(result)
    except concurrent.futures.InvalidStateError:
        log.debug("a request was cancelled as it ended")


def reject(future: concurrent.futures.Future[Any], error: BaseException) -> None:
    """Unless the caller has cancelled it, now or a moment ago."""
    try:
        future.set_exception(error)
    except concurrent.futures.InvalidStateError:
        log.debug("a request was cancelled as it failed")
