"""Access control of our server: token, body limits, strict JSON, allowed weight directories."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import socket
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from rljax.engines.http.protocol import BadRequest, parse_json
from rljax.engines.http.remote import OWNED, OWNER
from rljax.errors import SamplerError, UserError
from rljax.messaging.web_server import proved

log = logging.getLogger(__name__)

BODY_TIMEOUT = 60.0  # seconds for a body to arrive
OPEN_PATHS = ("/health", "/health_generate")  # answered without a token, as by SGLang: probes have no secrets
OWNER_SILENCE = 30.0  # seconds without a request of the owner, which checks the server every 5, until it is forgotten
GONE_SILENCE = 6.0  # the same, of an owner on this host whose process is gone
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(status: int, message: str) -> web.Response:
    """Returns an error in the shape of SGLang's."""
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Maps errors to statuses: 400 for bad input, 503 for a failed sampler, 500 for a bug of ours.

    A bug's traceback goes to the log, not to the client.
    """
    try:
        return await handler(request)
    except (BadRequest, UserError) as error:
        return error_response(400, str(error))
    except Owned as error:
        return error_response(OWNED, str(error))
    except SamplerError as error:
        return error_response(503, str(error))
    except web.HTTPException as error:
        return error_response(error.status, error.reason)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return error_response(500, "internal error (the server's log has it)")


@web.middleware
async def refuse_foreign_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses what a web page of another site has a browser send, token or not."""
    origin = request.headers.get("Origin")
    if origin is not None and urllib.parse.urlsplit(origin).netloc != request.host:
        return error_response(403, f"requests of web pages of {origin} are refused")
    return await handler(request)


def authorize(token: str | None, elsewhere: Sequence[str] = ()) -> Any:
    """Returns middleware that requires the token, if there is one, except for health probes.

    Args:
      elsewhere: beginnings of paths whose handlers check who asks.
    """
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not token or hmac.compare_digest(given, expected):
            proved(request)
        elif request.path not in OPEN_PATHS and not request.path.startswith(tuple(elsewhere)):
            return error_response(401, "Unauthorized")
        return await handler(request)

    return check


class Ownership:
    """Run that publishes to this server: one at a time, until it releases the server or is silent.

    Two runs on one server would each train on samples of the other's weights.
    """

    def __init__(self) -> None:
        self._owner, self._heard = "", 0.0

    def heard(self, request: web.Request) -> None:
        """Notes that the owner lives, if the request is its."""
        if self._owner and request.headers.get(OWNER) == self._owner:
            self._heard = time.monotonic()

    def require(self, request: web.Request) -> None:
        """Makes the sender of a request the owner, unless there is another. Raises Owned."""
        sender = request.headers.get(OWNER, "")
        silent = time.monotonic() - self._heard
        if self._owner and sender != self._owner and silent < self._patience:
            raise Owned(f"in use by the run of {self._owner.rpartition(' ')[0]}, last heard {silent:.0f} s ago")
        self._owner, self._heard = sender, time.monotonic()

    @property
    def _patience(self) -> float:
        """Seconds of silence after which the owner is forgotten."""
        here = re.fullmatch(re.escape(socket.gethostname()) + r" process (\d+) \S+", self._owner)
        gone = here and Path("/proc/self").exists() and not Path("/proc", here[1]).exists()
        return GONE_SILENCE if gone else OWNER_SILENCE

    def release(self, request: web.Request) -> None:
        if request.headers.get(OWNER) == self._owner:
            self._owner = ""


class Owned(Exception):
    """The server belongs to another run. The message is one line."""


async def json_body(request: web.Request) -> dict[str, Any]:
    """Reads the body as a JSON object.

    Raises BadRequest; aiohttp answers 413 past the limit of the application.
    """
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except web.HTTPException:
        raise
    except (ValueError, web.RequestPayloadError, LookupError) as error:  # broken chunks, an unknown encoding
        raise BadRequest(f"body: {error}") from None
    return parse_json(body)


def weight_directory(value: object, roots: Sequence[Path]) -> Path:
    """Checks that weights may be loaded from a directory, and returns it resolved.

    After all symbolic links are followed it must be below a root. It must have a config and
    safetensors, no pickles, and no code that comes with the model. Raises BadRequest.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        raise BadRequest("model_path: a directory is needed")
    try:
        directory = Path(value).resolve()
        inside = any(directory.is_relative_to(root.resolve()) for root in roots)
        if not inside:
            raise BadRequest("model_path: outside the allowed directories (add its parent to serve.weight_roots)")
        if not directory.is_dir():
            raise BadRequest("model_path: no such directory")
        _check_contents(directory)
    except (OSError, RuntimeError) as error:  # name too long, symlink loop, no permission
        raise BadRequest(f"model_path: {type(error).__name__}") from None
    return directory


def _check_contents(directory: Path) -> None:
    files = list(directory.iterdir())
    if not any(file.suffix == ".safetensors" for file in files):
        pickles = [file.name for file in files if file.suffix in PICKLES]
        hint = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
        raise BadRequest(f"model_path: no safetensors in it{hint}")
    for file in files:
        if not file.resolve().is_relative_to(directory) and file.suffix in (".safetensors", ".json"):
            raise BadRequest(f"model_path: {file.name} is a symbolic link out of its directory")
    try:
        config = json.loads((directory / "config.json").read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        raise BadRequest("model_path: config.json is missing or not valid JSON") from None
    if not isinstance(config, dict):
        raise BadRequest("model_path: config.json is not a JSON object")
    if "auto_map" in config:
        raise BadRequest("model_path: config.json asks for code of its own (auto_map), which is never run")
