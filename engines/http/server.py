"""Our server: any sampler behind SGLang's endpoints, so that one client works with either.

    POST /generate          input_ids, sampling_params, return_logprob, stream
                            -> output_ids, meta_info
    GET  /health, /get_model_info (/model_info), /get_server_info (/server_info)
    POST /pause_generation, /continue_generation, /abort_request, /flush_cache
    POST /update_weights_from_disk
    POST /release_memory_occupation, /resume_memory_occupation
    POST /release_ownership (not SGLang's)
    and those of rljax/agents/endpoint.py under /v1, if it is given one

Bodies and replies are SGLang's (rljax/engines/http/protocol.py). Endpoints that take pickles or
need torch are refused by name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

import rljax
from rljax.agents import PATHS, Endpoint
from rljax.engine import Sampler, WeightsInDirectory
from rljax.engines.http import protocol
from rljax.engines.http.access import (
    Ownership,
    answer_errors,
    authorize,
    error_response,
    json_body,
    refuse_foreign_origin,
    weight_directory,
)
from rljax.engines.http.generation import Generation
from rljax.engines.http.protocol import BadRequest
from rljax.engines.http.remote import OURS
from rljax.errors import SamplerError, UserError
from rljax.hf.tokenizer import HFTokenizer
from rljax.messaging.web_server import WebServer
from rljax.types import Finish, Piece

PAUSE_MODES = ("abort", "retract", "in_place")
UNSUPPORTED = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/end_weight_update",
)
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
MAX_VERSION = 2**31 - 1
PARSERS = 2  # threads that parse requests: a long text takes seconds, and many of them must not take all cores


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Limits of a server, and what it reports about itself."""

    model_path: str
    weight_roots: Sequence[Path]
    context_length: int | None = None  # tokens of prompt and completion; None: the sampler alone knows
    token: str | None = None
    max_requests: int = 1024
    max_body: int = 64 << 20  # bytes


class SamplerServer:
    """The web application around a sampler. It doesn't close the sampler."""

    def __init__(
        self,
        sampler: Sampler,
        options: ServerOptions,
        tokenizer: HFTokenizer | None = None,
        endpoint: Endpoint | None = None,
    ) -> None:
        """
        Args:
          tokenizer: for prompts and replies of text; None for token ids alone.
          endpoint: OpenAI's, served beside the native protocol.
        """
        self._sampler, self._options, self._tokenizer, self._endpoint = sampler, options, tokenizer, endpoint
        self._generations: dict[str, Generation] = {}
        self._arriving = 0  # requests that are being parsed
        self._parsers = ThreadPoolExecutor(PARSERS, "parser")
        self._control = asyncio.Lock()  # one pause, load or resume at a time
        self._server: WebServer | None = None
        self._ownership = Ownership()

    def application(self) -> web.Application:
        elsewhere = PATHS if self._endpoint is not None else ()
        app = web.Application(
            middlewares=[answer_errors, refuse_foreign_origin, authorize(self._options.token, elsewhere)],
            client_max_size=self._options.max_body,
        )
        if self._endpoint is not None:
            self._endpoint.add_routes(app)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self.health)
        for path in ("/get_model_info", "/model_info"):
            app.router.add_get(path, self.model_info)
        for path in ("/get_server_info", "/server_info"):
            app.router.add_get(path, self.server_info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.resume)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/flush_cache", self.flush_cache)
        app.router.add_post("/update_weights_from_disk", self.load_weights)
        app.router.add_post("/release_ownership", self.release_ownership)
        app.router.add_post("/release_memory_occupation", self.release)
        app.router.add_post("/resume_memory_occupation", self.reclaim)
        for path in UNSUPPORTED:
            app.router.add_post(path, self.unsupported)
        return app

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Starts listening; returns (host, port), where a port of 0 was replaced. Raises OSError."""
        self._server = WebServer(self.application(), peers="clients of the sampler")
        return await self._server.start(host, port)

    async def close(self) -> None:
        """Aborts requests under way and stops listening."""
        for generation in tuple(self._generations.values()):
            generation.abort()
        if self._endpoint is not None:
            self._endpoint.sessions.close()
        if self._server is not None:
            await self._server.close()
        self._parsers.shutdown(wait=False, cancel_futures=True)

    # Completions

    async def generate(self, request: web.Request) -> web.StreamResponse:
        encode = self._tokenizer.encode_document if self._tokenizer else None
        stop_ids = self._tokenizer.eos_token_ids if self._tokenizer else ()
        if len(self._generations) + self._arriving >= self._options.max_requests:
            return error_response(503, f"{self._options.max_requests} requests are under way (the limit is serve.max_requests)")
        self._arriving += 1
        try:
            body = await json_body(request)
            parse = functools.partial(protocol.parse_generate, body, encode=encode, default_stop_ids=stop_ids)
            parsed = await asyncio.get_running_loop().run_in_executor(self._parsers, parse)
        finally:
            self._arriving -= 1
        rid = parsed.request.id
        if rid in self._generations:
            raise BadRequest(f"rid: {rid!r} is in use by a request under way (use another)")
        generation = self._generations[rid] = Generation(parsed, self._sampler)
        try:
            if parsed.stream:
                return await self._stream(request, generation)
            piece = await generation.whole()
            return web.json_response(self._reply(generation, piece, len(piece.token_ids)))
        finally:
            del self._generations[rid]
            await generation.close()

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        """Streams a completion.

        Sends nothing before the first tokens, so that a refused request gets its own status.
        """
        await generation.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        sent = 0
        try:
            while True:
                total, finished = generation.total, generation.finish is not None
                if total > sent or finished:
                    piece = generation.tokens_from(sent if generation.parsed.incremental else 0)
                    await self._event(response, json.dumps(self._reply(generation, piece, total)))
                    sent = total
                if finished:
                    break
                await generation.wait()
        except (UserError, SamplerError) as error:  # too late for a status
            await self._event(response, json.dumps({"error": {"message": str(error), "code": 503}}))
        await self._event(response, "[DONE]")
        await response.write_eof()
        return response

    async def _event(self, response: web.StreamResponse, data: str) -> None:
        await response.write(f"data: {data}\n\n".encode())

    def _reply(self, generation: Generation, piece: Piece, total: int) -> dict[str, Any]:
        text = self._text(generation.parsed, piece)
        return protocol.reply(
            generation.parsed,
            piece.token_ids,
            piece.logp,
            piece.versions,
            piece.finish,
            total=total,
            version=self._sampler.version,
            text=text,
        )

    def _text(self, parsed: protocol.ParsedRequest, piece: Piece) -> str:
        """Returns the text of a piece, without the stop id that ended it."""
        if self._tokenizer is None:
            return ""
        ids = piece.token_ids.tolist()
        if parsed.stop_trim and piece.finish is Finish.STOP and ids and ids[-1] in parsed.request.params.stop_token_ids:
            ids = ids[:-1]
        return self._tokenizer.decode(ids, skip_special_tokens=parsed.skip_special_tokens)

    async def abort(self, request: web.Request) -> web.Response:
        """Aborts requests by exact id, not by prefix as SGLang does, or for the server's owner all."""
        body = await json_body(request)
        rid, abort_all = body.get("rid"), body.get("abort_all", False)
        if not isinstance(abort_all, bool) or not (rid is None or isinstance(rid, str)):
            raise BadRequest("abort_request: rid must be a string, abort_all true or false")
        if abort_all:
            self._ownership.require(request)
        for generation in [generation for name, generation in self._generations.items() if abort_all or name == rid]:
            generation.abort()
        return web.json_response({})

    # Control

    async def pause(self, request: web.Request) -> web.Response:
        self._ownership.require(request)
        mode = (await json_body(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode: must be one of {', '.join(PAUSE_MODES)}")
        async with self._control:
            if mode == "abort":
                for generation in tuple(self._generations.values()):
                    generation.abort()
            await self._sampler.pause()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: web.Request) -> web.Response:
        self._ownership.require(request)
        await json_body(request)
        async with self._control:
            await self._sampler.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def load_weights(self, request: web.Request) -> web.Response:
        """Loads weights from a directory. Without a weight_version the version goes up by one.

        Requests in flight continue. flush_cache changes nothing: no cache of older weights serves
        later requests either way, and the sampler decides about requests in flight.
        """
        self._ownership.require(request)
        body = await json_body(request)
        directory = await asyncio.to_thread(weight_directory, body.get("model_path"), self._options.weight_roots)
        async with self._control:
            version = _version(body.get("weight_version"), self._sampler.version + 1)
            await self._sampler.load_weights(WeightsInDirectory(directory), version)
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def release(self, request: web.Request) -> web.Response:
        """Releases all memory, whatever the tags; does nothing with a sampler that can't.

        Refused while a request is running, as with SGLang.
        """
        self._ownership.require(request)
        _check_tags(await json_body(request))
        if self._generations:
            raise BadRequest(f"release_memory_occupation: {len(self._generations)} requests are under way (abort them first)")
        async with self._control:
            await self._sampler.release()
        return web.json_response(None)

    async def reclaim(self, request: web.Request) -> web.Response:
        self._ownership.require(request)
        _check_tags(await json_body(request))
        async with self._control:
            await self._sampler.reclaim()
        return web.json_response(None)

    async def release_ownership(self, request: web.Request) -> web.Response:
        self._ownership.release(request)
        return web.json_response({})

    async def flush_cache(self, request: web.Request) -> web.Response:
        await json_body(request)
        return web.Response(text="Nothing to flush: prefixes are shared only under the weights that made them.\n")

    async def unsupported(self, request: web.Request) -> web.Response:
        raise BadRequest(f"{request.path}: not supported by this server (use /update_weights_from_disk)")

    # Properties

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        self._ownership.heard(request)
        info = {
            "model_path": self._options.model_path,
            "tokenizer_path": self._options.model_path,
            "is_generation": True,
            "weight_version": str(self._sampler.version),
        }
        return web.json_response(info)

    async def server_info(self, request: web.Request) -> web.Response:
        info = {
            "version": f"{OURS}-{rljax.__version__}",
            "model_path": self._options.model_path,
            "context_length": self._options.context_length,
            "max_running_requests": self._options.max_requests,
            "disable_overlap_schedule": True,  # no step straddles a pause
            "running_requests": len(self._generations),
        }
        return web.json_response(info)


def _check_tags(body: dict[str, Any]) -> None:
    tags = body.get("tags")
    if tags is not None and not (isinstance(tags, list) and set(map(str, tags)) <= set(MEMORY_TAGS)):
        raise BadRequest(f"tags: must be a list of {', '.join(MEMORY_TAGS)}; leave it out for all")


def _version(value: object, default: int) -> int:
    if value is None:
        return default
    text = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= MAX_VERSION):
        raise BadRequest(f"weight_version: must be a number from 0 to {MAX_VERSION}")
    return int(text)


def is_loopback(host: str) -> bool:
    """Returns whether an address to listen on can be reached from this machine only."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(str(address).startswith("127.") or address == "::1" for address in addresses)
