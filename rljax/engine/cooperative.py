"""Base class for samplers that compute in the event loop itself, one token per turn."""

from __future__ import annotations

import asyncio

from rljax.engine.interface import Sampler
from rljax.errors import SamplerError, UserError
from rljax.types import Request


class CooperativeSampler(Sampler):
    """A sampler whose requests take turns in the event loop. Implements pause, resume and close.

    A subclass writes `generate` and `load_weights`:

        async def generate(self, request):
            self.begin(request)
            while len(tokens) < request.params.max_new_tokens:
                if not await self.turn():
                    finish = Finish.ABORT
                    break
                ...                          # draws one token, and records self.version with it
    """

    version = 0

    def __init__(self) -> None:
        self._running, self._closed = asyncio.Event(), False
        self._running.set()

    def begin(self, request: Request) -> None:
        """Checks a request.

        Raises SamplerError once the sampler is closed, UserError for an empty prompt.
        """
        if self._closed:
            raise SamplerError("the sampler is closed")
        if not len(request.prompt_ids):
            raise UserError(f"request {request.id}: the prompt is empty; a sampler needs at least one token")

    async def turn(self) -> bool:
        """Waits for the request's next turn, after the other requests and not during a pause.

        Weights and version stay as they are until the caller awaits something again.

        Returns:
          False once the sampler is closed: the request ends with finish `abort`.
        """
        await asyncio.sleep(0)
        await self._running.wait()
        return not self._closed

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        self._closed = True
        self._running.set()
