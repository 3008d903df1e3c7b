"""The JAX sampler: continuous batching over slots, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np

from rljax import tracing
from rljax.backends.jax.mesh import pool_mesh
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engine import Sampler, WeightSource
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.sampling.orders import MAX_STOP_IDS
from rljax.engines.jax.sampling.programs import Programs
from rljax.engines.jax.sampling.scheduler import SamplerStats, Scheduler
from rljax.engines.jax.sampling.slots import Work
from rljax.engines.jax.sampling.stop_strings import StopStrings
from rljax.engines.jax.scoring import scorer_of
from rljax.errors import PromptTooLong, UserError
from rljax.hf.tokenizer import Tokenizer, load_tokenizer
from rljax.types import Completion, Piece, Request

log = logging.getLogger(__name__)


class JaxSampler(Sampler):
    """A `Sampler` on the devices of a pool. Its methods may be called from any event loop, any
    number at once.

    Example:
        sampler = JaxSampler(config, Pool("jax"), Path("models/SmolLM2-135M-Instruct"))  # compiles
        params = SamplingParams(64, stop_token_ids=(2,))
        completion = await sampler.generate(Request("a", prompt_ids, params, seed=1))

    With `jax.bitwise` a completion's log-probs are the learner's own, as
    `rljax.engines.jax.scoring` computes them, and the unit ratio is exact. A completion is a
    function of weights, prompt, params and seed: slots, company and `jax.decode_steps` don't
    matter. Seeds count modulo 2**32. Only `params` ends a completion: the model's EOS ids must be
    among its stop_token_ids.
    """

    def __init__(self, config: Config, pool: Pool, model_dir: Path, *, ahead: int | None = None) -> None:
        """Loads the weights and compiles. `ahead` as in `Scheduler`; None: 1 where a device works
        beside the CPU.

        Raises:
          UserError: slots that the pool's data dimension does not divide, a pool with more devices
            than there are, a `jax.decode_attention` that can't do this, a cache without room for
            one request, or a model directory that can't be loaded. (A context longer than the
            model's is refused by the plugin's check.)
        """
        settings = JaxConfig.of(config)
        mesh = pool_mesh(pool, sampling=True)
        self._programs = Programs(config, model_dir, mesh)
        room = self._programs.pages * self._programs.shards * self._programs.page_size
        log.info("decode attention: %s; room for %d tokens", self._programs.attention.name, room)
        self._programs.warm_up()
        self._model_dir = model_dir
        self.lends = settings.release_memory
        self._bitwise = settings.bitwise
        if ahead is None:
            ahead = 0 if mesh.devices.flat[0].platform == "cpu" else 1
        self._scheduler = Scheduler(
            self._programs,
            recompute=config.rollout.recompute_kv_on_publish,
            ahead=ahead,
            scorer=scorer_of(config, self._programs.spec, mesh) if settings.bitwise else None,
            scored_temperature=config.gconfig.temperature,
        )

    @property
    def version(self) -> int:
        return self._scheduler.version

    @property
    def compilations(self) -> int:
        """Programs compiled so far; it does not rise after construction."""
        return self._programs.compilations

    @property
    def dispatches(self) -> dict[str, int]:
        """Programs sent to the device so far, warm-up included, by kind."""
        return dict(self._programs.dispatches)

    @property
    def decode_attention(self) -> str:
        """Name of the implementation in use."""
        return self._programs.attention.name

    @property
    def memory_peak(self) -> int | None:
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in self._programs.mesh.local_devices]
        return max((peak for peak in peaks if peak is not None), default=None)

    def stats(self) -> SamplerStats:
        return self._scheduler.stats()

    async def generate(self, request: Request) -> Completion:
        """Samples one completion; cancelling the call aborts it.

        A completion ends with a stop id, or with the token that completes a stop string (text of
        that token behind the stop string included: tokens are not split). Neither ends it before
        min_new_tokens: stop ids are not drawn until then, stop strings are passed over. With no
        room left in the context it ends as at max_new_tokens, by `length`.

        Raises:
          UserError: a prompt that is empty, holds an id outside the vocabulary, or leaves no room
            in the context (PromptTooLong); too many stop ids.
          SamplerError: the sampler failed or is closed.
        """
        try:
            return await asyncio.wrap_future(self._scheduler.submit(self._work(request)))
        finally:
            self._count()

    def _count(self) -> None:
        if tracing.is_on():
            stats = self.stats()
            tracing.count("jax sampler", running=stats.running, waiting=stats.waiting)

    async def stream(self, request: Request) -> AsyncGenerator[Piece, None]:
        """Yields the completion, one piece per dispatch.

        With `jax.bitwise` all comes at the end, where the log-probs are computed.
        """
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece | None]()

        def listener(piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed under its requests
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        work = self._work(request)
        work.listener = None if self._bitwise else listener
        future = asyncio.wrap_future(self._scheduler.submit(work))
        future.add_done_callback(lambda _: pieces.put_nowait(None))
        sent = 0
        try:
            while (piece := await pieces.get()) is not None:
                sent += len(piece.token_ids)
                yield piece
            done = await future
            yield Piece(done.token_ids[sent:], done.logp[sent:], done.versions[sent:], done.finish)
        finally:
            future.cancel()

    def _work(self, request: Request) -> Work:
        prompt, params = request.prompt_ids, request.params
        context, vocabulary = self._programs.context, self._programs.spec.vocab_size
        if request.pictures:
            raise UserError(f"request {request.id}: the JAX sampler reads no pictures (sglang does: docs/vision.md)")
        if not len(prompt):
            raise UserError(f"request {request.id}: the prompt is empty; a sampler needs at least one token")
        if len(prompt) >= context:
            raise PromptTooLong(
                f"request {request.id}: a prompt of {len(prompt)} tokens leaves no room in jax.context_length={context}"
            )
        if np.min(prompt) < 0 or np.max(prompt) >= vocabulary:
            raise UserError(f"request {request.id}: the prompt has a token id outside the vocabulary [0, {vocabulary})")
        if len(params.stop_token_ids) > MAX_STOP_IDS:
            raise UserError(
                f"request {request.id}: {len(params.stop_token_ids)} stop_token_ids; at most {MAX_STOP_IDS} are possible"
            )
        stops = StopStrings(self._tokenizer, params.stop) if params.stop else None
        return Work(request, min(params.max_new_tokens, context - len(prompt)), stops)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._model_dir)  # only stop strings need it

    async def pause(self) -> None:
        await asyncio.wrap_future(self._scheduler.command(self._scheduler.pause))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._scheduler.command(self._scheduler.resume))

    async def load_weights(self, source: WeightSource, version: int) -> None:
        """Swaps weights between two decode steps, paused or not; a source that can't be loaded
        leaves the old ones.

        With `rollout.recompute_kv_on_publish` what is in flight is prefilled again under the new
        weights; else it keeps the keys and values it has, and only requests that start later see
        none of them.
        """
        await asyncio.wrap_future(self._scheduler.command(functools.partial(self._scheduler.load, source, version)))

    async def release(self) -> None:
        """Lets go of weights and cache, after the decode step that runs.

        Requests in flight wait, and are prefilled again.
        """
        await asyncio.wrap_future(self._scheduler.command(self._scheduler.release))

    async def reclaim(self) -> None:
        """An empty cache again; `load_weights` fills the rest, and then `resume` may be called."""
        await asyncio.wrap_future(self._scheduler.command(self._scheduler.reclaim))

    async def close(self) -> None:
        """Ends every request with finish `abort`, keeping its tokens so far, and frees cache and
        weights. May be repeated.
        """
        await asyncio.to_thread(self._scheduler.close)
