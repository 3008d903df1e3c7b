"""A sampler of numbers behind our server, on a port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rljax.engine import Sampler, WeightSource
from rljax.engines.http.server import SamplerServer, ServerOptions
from rljax.errors import UserError
from rljax.testing.sampler_contract import Loop
from rljax.types import Completion, Finish, Piece, Request

ANSWER = 10.0  # seconds after which an answer is a hang
VOCABULARY = 50
GENERATE = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}


class Counting(Sampler):
    """A streaming sampler of 1, 2, 3, ...; its log-probs are minus the version."""

    version = 0

    def __init__(self) -> None:
        self.running = asyncio.Event()
        self.running.set()
        self.step = 0.0
        self.under_way = 0
        self.taken = asyncio.Event()  # a piece was
        self.broken: Exception | None = None

    async def stream(self, request: Request) -> AsyncIterator[Piece]:
        if self.broken:
            raise self.broken
        if np.max(request.prompt_ids) >= VOCABULARY:
            raise UserError("the prompt has a token id outside the vocabulary")
        self.under_way += 1
        try:
            for index in range(min(request.params.max_new_tokens, 100)):
                await asyncio.sleep(self.step)
                await self.running.wait()
                last = index + 1 == min(request.params.max_new_tokens, 100)
                one = [np.array([value], dtype) for value, dtype in ((index + 1, np.int32), (-self.version, np.float32))]
                yield Piece(*one, np.array([self.version], np.int32), Finish.LENGTH if last else None)
                self.taken.set()
        finally:
            self.under_way -= 1

    async def generate(self, request: Request) -> Completion:
        raise AssertionError("the server streams where it can")

    async def pause(self) -> None:
        self.running.clear()

    async def resume(self) -> None:
        self.running.set()

    async def load_weights(self, source: WeightSource, version: int) -> None:
        self.version = version

    async def close(self) -> None: ...


class Served:
    """A server and a client in an event loop of their own."""

    def __init__(self, weights: Path, **options: Any) -> None:
        self.loop = Loop()
        self.loop.run(self._start(weights, options))

    async def _start(self, weights: Path, options: dict[str, Any]) -> None:
        self.sampler = Counting()
        self.server = SamplerServer(self.sampler, ServerOptions("model", [weights], **options))
        host, port = await self.server.start("127.0.0.1", 0)
        self.address, self.base = (host, port), f"http://{host}:{port}"
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER))

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, str]:
        async def send() -> tuple[int, str]:
            data = body if isinstance(body, bytes) else json.dumps(body) if body is not None else None
            async with self.session.request(method, self.base + path, data=data, **options) as response:
                return response.status, await response.text()

        return self.loop.run(send())

    def post(self, path: str, body: Any, **options: Any) -> tuple[int, str]:
        return self.call("POST", path, body, **options)

    def close(self) -> None:
        async def stop() -> None:
            await self.session.close()
            await self.server.close()

        self.loop.run(stop())
        self.loop.close()
