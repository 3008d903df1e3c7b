"""A base class for samplers that compute in the event loop itself, one token per turn of it."""

from __future__ import annotations

import asyncio

from rljax.engine.interface import Sampler
from rljax.errors import SamplerError, UserError
from rljax.types import Request


class CooperativeSampler(Sampler):
    """A sampler whose requests take turns in the event loop; pauses, resumes and the end are done
    here.

    A subclass writes `generate` and `load_weights`:

        async def generate(self, request):
            self.begin(request)
            while len(tokens) < request.params.max_new_tokens:
                if not await self.turn():
                    finish = Finish.ABORT
                    break
                ...                          # draws one token, and notes self.version beside it
    """

    version = 0

    def __init__(self) -> None:
        self._running, self._closed = asyncio.Event(), False
        self._running.set()

    def begin(self, request: Request) -> None:
        """Raises SamplerError once the sampler is closed, UserError for an empty prompt."""
        if self._closed:
            raise SamplerError("the sampler is closed")
        if not len(request.prompt_ids):
            raise UserError(f"request {request.id}: the prompt is empty; a sampler needs at least one token")

    async def turn(self) -> bool:
        """Waits until the request may draw its next token: after the others had a turn, and in no
        pause.

        Until the caller waits for something again, weights and version stay as they are.

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
