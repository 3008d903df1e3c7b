"""One /generate request at our server: collects the sampler's pieces for its reply."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from rljax.engine import Generator
from rljax.engines.http.protocol import ParsedRequest
from rljax.types import Finish, Piece


class Generation:
    """A completion under way.

    Sampling runs in a task of its own, which is cancelled by an abort or when the client
    disconnects.
    """

    def __init__(self, parsed: ParsedRequest, generator: Generator) -> None:
        self.parsed = parsed
        self.finish: Finish | None = None
        self._error: Exception | None = None
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(generator))

    async def _run(self, generator: Generator) -> None:
        try:
            async with contextlib.aclosing(generator.stream(self.parsed.request)) as pieces:
                async for piece in pieces:
                    self._pieces.append(piece)
                    self.finish = piece.finish
                    self._news.set()
        except Exception as error:  # raised in `wait`
            self._error = error
        finally:
            if self.finish is None:
                self.finish = Finish.ABORT
            self._news.set()

    def abort(self) -> None:
        """Ends the completion with the tokens it has."""
        self._task.cancel()

    async def wait(self) -> None:
        """Waits for more tokens or the end. Raises what the sampler raised."""
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error

    async def whole(self) -> Piece:
        while self.finish is None:
            await self.wait()
        return self.tokens_from(0)

    @property
    def total(self) -> int:
        return sum(len(piece.token_ids) for piece in self._pieces)

    def tokens_from(self, start: int) -> Piece:
        """Returns all tokens from index `start` on."""
        return Piece(
            np.concatenate([np.empty(0, np.int32), *(p.token_ids for p in self._pieces)])[start:],
            np.concatenate([np.empty(0, np.float32), *(p.logp for p in self._pieces)])[start:],
            np.concatenate([np.empty(0, np.int32), *(p.versions for p in self._pieces)])[start:],
            self.finish,
        )

    async def close(self) -> None:
        """Cancels sampling and returns when the sampler has released the request."""
        self._task.cancel()
        await asyncio.wait({self._task})
