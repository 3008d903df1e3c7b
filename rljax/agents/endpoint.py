"""The OpenAI-compatible endpoint in front of a generator.

    POST /v1/chat/completions, /v1/completions      stream, tools, n, logprobs, stop, seed
    GET  /v1/models
    POST /v1/rewards        {"reward": 1.0, "completion_id": ...}     of a turn; by default the last
    POST /v1/sessions       {"seed": 7}  ->  {"id", "api_key", "base_url"}
    GET  /v1/trajectories?style=concat&turn_discount=1.0              of the session
    DELETE /v1/sessions/KEY

The session that a request belongs to is named by its API key, or by its path:
/sessions/KEY/v1/chat/completions. What is sampled in a session is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from rljax.agents import replies
from rljax.agents.dialogue import Dialogue
from rljax.agents.errors import ApiError
from rljax.agents.exchange import Exchange
from rljax.agents.parameters import parse_chat, parse_completion
from rljax.agents.recording import STYLES
from rljax.agents.session import SamplingPolicy, Session, Sessions
from rljax.engine import Generator
from rljax.messaging.web_server import proved
from rljax.types import Trajectory

BODY_TIMEOUT = 60.0  # seconds for a body to arrive
PATHS = ("/v1/", "/sessions/")  # what the endpoint answers, and checks who asks

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True)
class Guest:
    """Terms for requests of no session, which may also open one: those of `experiments.serve`."""

    generator: Generator
    policy: SamplingPolicy
    token: str | None  # None: anyone


class Endpoint:
    """The endpoint's handlers, over the open sessions."""

    def __init__(self, dialogue: Dialogue, model: str, *, guest: Guest | None = None, most_requests: int | None = None) -> None:
        """
        Args:
          model: its name in replies.
          guest: None if only sessions that this process opened are served.
          most_requests: completions under way at once; None for no limit.
        """
        self.sessions = Sessions() if guest is not None else Sessions(most=None)
        self._dialogue, self._model, self._guest, self._most_requests = dialogue, model, guest, most_requests
        self._requests = 0

    def add_routes(self, app: web.Application) -> None:
        for base in ("/v1", "/sessions/{key}/v1"):
            app.router.add_post(f"{base}/chat/completions", self._answering(self.chat))
            app.router.add_post(f"{base}/completions", self._answering(self.complete))
            app.router.add_get(f"{base}/models", self._answering(self.models))
            app.router.add_get(f"{base}/models/{{model:.+}}", self._answering(self.model))
            app.router.add_post(f"{base}/rewards", self._answering(self.reward))
            app.router.add_get(f"{base}/trajectories", self._answering(self.trajectories))
        if self._guest is not None:
            app.router.add_post("/v1/sessions", self._answering(self.open))
            app.router.add_delete("/v1/sessions/{key}", self._answering(self.end))

    # Completions

    async def chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        async with self._room():
            exchange = await Exchange.chat(session, self._dialogue, parse_chat(await _json(request)))
            if exchange.options.stream:
                return await self._stream(request, exchange, chat=True)
            async for _ in exchange.run():
                pass
            return web.json_response(replies.chat_reply(exchange, self._model))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        async with self._room():
            exchange = await Exchange.complete(session, self._dialogue, parse_completion(await _json(request)))
            if exchange.options.stream:
                return await self._stream(request, exchange, chat=False)
            async for _ in exchange.run():
                pass
            return web.json_response(replies.completion_reply(exchange, self._model))

    async def _stream(self, request: web.Request, exchange: Exchange, *, chat: bool) -> web.StreamResponse:
        """Streams a reply as server-sent events.

        Sends nothing before the first news, so that a refused request gets its own status.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        chunks = replies.chat_chunks if chat else replies.completion_chunks
        try:
            async with contextlib.aclosing(exchange.run()) as deltas:
                async for delta in deltas:
                    if not response.prepared:
                        await response.prepare(request)
                        for chunk in replies.first_chat_chunks(exchange, self._model) if chat else ():
                            await _event(response, chunk)
                    for chunk in chunks(exchange, self._model, delta):
                        await _event(response, chunk)
        except ApiError as error:
            if not response.prepared:
                raise
            await _event(response, error.body())  # too late for a status
        if exchange.options.include_usage:
            kind = "chat.completion.chunk" if chat else "text_completion"
            await _event(response, replies.usage_chunk(exchange, self._model, kind))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    @contextlib.asynccontextmanager
    async def _room(self) -> AsyncIterator[None]:
        """Counts a request under way. Raises ApiError where there are too many."""
        if self._most_requests is not None and self._requests >= self._most_requests:
            raise ApiError(f"{self._most_requests} requests are under way", code="rate_limit_exceeded", status=429)
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    # Models

    async def models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [self._described()]})

    async def model(self, request: web.Request) -> web.Response:
        self._session(request)
        if (name := request.match_info["model"]) != self._model:
            raise ApiError(f"The model '{name}' does not exist (there is {self._model})", code="model_not_found", status=404)
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": 0, "owned_by": "rljax"}

    # Sessions

    async def reward(self, request: web.Request) -> web.Response:
        session, body = self._recorded(request), await _json(request)
        value, turn, choice = body.get("reward"), body.get("completion_id"), body.get("choice", 0)
        try:
            if isinstance(value, bool):
                raise ValueError("the reward is a bool, not a number")
            session.set_reward(value, turn, choice)
        except ValueError as error:
            raise ApiError(str(error), param="reward", code="invalid_value") from None
        except KeyError:
            raise ApiError(
                f"completion_id: this session has no completion {turn}", param="completion_id", code="not_found"
            ) from None
        return web.json_response({"completion_id": turn, "reward": value})

    async def open(self, request: web.Request) -> web.Response:
        guest = self._authorized_guest(request)
        body = await _json(request)
        seed = body.get("seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool) or set(body) - {"seed"}:
            raise ApiError("a session takes a seed, an integer, and nothing else", param="seed", code="invalid_value")
        session = Session(guest.generator, guest.policy, seed, "")
        session.name = session.key
        self.sessions.add(session)
        base_url = f"{request.scheme}://{request.host}/sessions/{session.key}/v1"
        return web.json_response({"id": session.key, "api_key": session.key, "base_url": base_url})

    async def trajectories(self, request: web.Request) -> web.Response:
        session = self._recorded(request)
        style, text = request.query.get("style", "concat"), request.query.get("turn_discount", "1.0")
        try:
            discount = float(text)
        except ValueError:
            discount = math.nan
        if style not in STYLES or not math.isfinite(discount):
            raise ApiError(f"style: one of {', '.join(STYLES)}; turn_discount: a number", param="style", code="invalid_value")
        if not session.recording.turns:
            raise ApiError("nothing was sampled in this session", code="not_found", status=404)
        found = session.trajectories(style, discount, {})
        return web.json_response({"trajectories": [_trajectory(trajectory) for trajectory in found]})

    async def end(self, request: web.Request) -> web.Response:
        session = self.sessions.get(request.match_info["key"])
        if session is None:
            raise ApiError("no such session", code="not_found", status=404)
        self.sessions.end(session)
        return web.json_response({"id": session.key, "deleted": True})

    # Who asks

    def _session(self, request: web.Request) -> Session:
        """Returns the session of a request, which its path or its API key names.

        Raises ApiError if there is none, and the endpoint has no guests or this is none.
        """
        named = request.match_info.get("key")
        session = self.sessions.get(_bearer(request) if named is None else named)
        if session is not None:
            proved(request)
            return session
        if named is not None:
            raise ApiError("no such session, or it has ended", code="invalid_api_key", status=401)
        guest = self._authorized_guest(request)
        return Session(guest.generator, guest.policy, 0, "guest-" + str(id(request)), recorded=False)

    def _recorded(self, request: web.Request) -> Session:
        session = self._session(request)
        if not session.recorded:
            raise ApiError("this needs a session (POST /v1/sessions)", code="invalid_api_key", status=401)
        return session

    def _authorized_guest(self, request: web.Request) -> Guest:
        guest = self._guest
        if guest is None:
            raise ApiError("this API key is of no session, or the session has ended", code="invalid_api_key", status=401)
        if guest.token and not hmac.compare_digest(_bearer(request).encode(errors="surrogateescape"), guest.token.encode()):
            raise ApiError("Incorrect API key provided", code="invalid_api_key", status=401)
        proved(request)
        return guest

    def _answering(self, handler: Handler) -> Handler:
        """Returns a handler that answers with errors in OpenAI's shape."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except ApiError as error:
                return web.json_response(error.body(), status=error.status)
            except web.HTTPException as error:
                return web.json_response(ApiError(error.reason).body(), status=error.status)
            except (ConnectionError, asyncio.CancelledError):
                raise
            except Exception:
                log.exception("%s %s", request.method, request.rel_url.name)
                return web.json_response(ApiError("internal error (the server's log has it)", status=500).body(), status=500)

        return answer


async def _event(response: web.StreamResponse, value: Mapping[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").strip()


async def _json(request: web.Request) -> dict[str, Any]:
    """Reads the body as a JSON object. Raises ApiError; aiohttp answers 413 past the limit."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            body = await request.read()
        value = json.loads(body, parse_constant=_refuse_constant) if body else {}
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (ValueError, RecursionError, web.RequestPayloadError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"body: not JSON: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"body: a JSON object is needed, not {type(value).__name__}", code="invalid_json")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.tolist(),
        "behavior_logp": trajectory.behavior_logp.tolist(),
        "versions": trajectory.versions.tolist(),
        "reward": trajectory.reward,
        "components": dict(trajectory.components),
        "finish": str(trajectory.finish),
    }
