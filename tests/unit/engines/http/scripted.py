"""A scripted server with SGLang's protocol: breaks off, refuses, hangs or labels late on request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from aiohttp import web

from rljax.engines.http.client import HttpSampler
from rljax.engines.http.remote import Remote, ServerInfo

CONTEXT = 256
SGLANG_17 = ServerInfo(release=(0, 5, 17), ours=False, overlapped=True, context_length=CONTEXT, vocabulary=1000)
SGLANG_23 = ServerInfo(release=(0, 5, 23), ours=False, overlapped=False, context_length=CONTEXT, vocabulary=1000)


def next_token(context: Sequence[int]) -> int:
    """Samples the model: a token is a function of all tokens before it.

    So a completion can be checked wherever it was cut.
    """
    value = 17
    for token in context:
        value = (value * 31 + token + 1) % 997
    return value


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class ScriptedServer:
    """Samples one token per step.

    `script` is called before each token of each request, and may misbehave.
    """

    def __init__(self) -> None:
        self.version = 0
        self.bodies: list[dict[str, Any]] = []  # of /generate
        self.calls: list[tuple[str, dict[str, Any]]] = []  # of everything else
        self.headers: list[str | None] = []
        self.script: Callable[[ScriptedServer, int], Any] = lambda server, token: None
        self.refuse_load = False
        self.silent: set[str] = set()  # names of calls that are accepted and never answered; "*" for all
        self.info_body: object = None  # what /get_model_info answers; None: what it should
        self.step = 0.0005  # seconds
        self.incremental = False
        self.spans = False
        self.relabel: Callable[[int], int] = lambda version: version  # what the front end takes the version to be
        self._running = asyncio.Event()
        self._running.set()
        self._aborted: set[str] = set()
        self.runner: web.AppRunner | None = None
        self.base = ""

    async def start(self, port: int = 0) -> str:
        app = web.Application(middlewares=[self.fall_silent])
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/get_model_info", self.info)
        app.router.add_get("/get_server_info", self.info)
        app.router.add_post("/{name}", self.control)
        self.runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.base = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self.base

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()

    @web.middleware
    async def fall_silent(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        while self.silent & {"*", request.path.removeprefix("/")}:
            await asyncio.sleep(0.01)
        response: web.StreamResponse = await handler(request)
        return response

    async def info(self, request: web.Request) -> web.Response:
        if self.info_body is not None:
            return web.json_response(self.info_body)
        return web.json_response({"weight_version": str(self.version), "model_path": "", "version": "0.5.17"})

    async def control(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        self.calls.append((name, body))
        if name == "pause_generation":
            self._running.clear()
            if body["mode"] == "abort":
                self._aborted |= {body["rid"] for body in self.bodies}
        elif name == "continue_generation":
            self._running.set()
        elif name == "abort_request":
            self._aborted.add(body["rid"])
        elif name == "update_weights_from_disk":
            if self.refuse_load:
                return web.json_response({"success": False, "message": "no such tensor"}, status=400)
            self.version = int(body["weight_version"])
        return web.json_response({"success": True})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers.get("Authorization"))
        harm = self.script(self, -1)
        if isinstance(harm, web.Response):
            return harm
        response = web.StreamResponse()
        await response.prepare(request)
        tokens: list[int] = []
        versions: list[int] = []
        finish: dict[str, Any] | None = None
        while finish is None:
            await asyncio.sleep(self.step)
            while not self._running.is_set() and body["rid"] not in self._aborted:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._running.wait(), 0.01)
            harm = self.script(self, len(tokens))
            while "*" in self.silent:
                await asyncio.sleep(0.01)
            if harm == "break":
                assert request.transport is not None
                request.transport.abort()
                return response
            if harm == "abort" or body["rid"] in self._aborted:
                finish = {"type": "abort", "message": "Aborted"}
            else:
                tokens.append(next_token([*body["input_ids"], *tokens]))
                versions.append(self.version)
            if finish is None and len(tokens) == body["sampling_params"]["max_new_tokens"]:
                finish = {"type": "length", "length": len(tokens)}
            await response.write(self._chunk(tokens, versions, finish))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunk(self, tokens: list[int], versions: list[int], finish: dict[str, Any] | None) -> bytes:
        shown = tokens[-1:] if self.incremental else tokens
        meta: dict[str, Any] = {
            "finish_reason": finish,
            "completion_tokens": len(tokens),
            "weight_version": str(self.relabel(self.version)),
            "output_token_logprobs": [[-float(token) / 1000, token, None] for token in shown],
        }
        if self.spans and finish is not None:
            changes = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
            spans = itertools.pairwise(changes)
            meta["weight_versions"] = [{"version": str(versions[a]), "start": a, "end": b} for a, b in spans if a < b]
        return b"data: " + json.dumps({"text": "", "output_ids": shown, "meta_info": meta}).encode() + b"\n\n"


def client_of(*servers: ScriptedServer, info: ServerInfo = SGLANG_17, token: str | None = None, **options: Any) -> HttpSampler:
    remotes = [Remote(server.base, info, token) for server in servers]
    return HttpSampler(remotes, **({"version": 0} | options))
