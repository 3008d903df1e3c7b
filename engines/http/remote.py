"""One server: what it is, whether it is there, and calls to it."""

from __future__ import annotations

import dataclasses
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from rljax.engines.http.replies import Reply, version_of
from rljax.errors import SamplerError, UserError

TOKEN_VARIABLE = "RLJAX_TOKEN"  # environment variable of the bearer token, for client and server
SPANS_AND_INTERVALS = (0, 5, 23)  # SGLang takes stream_interval by request, and retracts before a flush, from here on
OURS = "rljax"  # what our server says it is
SERVERS_KEEP = 5.0  # seconds that SGLang keeps an idle connection (uvicorn's default); ours keeps it longer
_LINE_LIMIT = 1 << 26  # bytes of one chunk
_ERROR_LENGTH = 500  # characters of a server's message that are shown


class ServerLost(Exception):
    """The server didn't answer, broke off, or can't serve now; another one may."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a server says of itself when it is attached to."""

    release: tuple[int, ...]  # of SGLang; empty for ours
    ours: bool
    overlapped: bool  # a decode step may straddle a pause: rljax/engines/http/replies.py
    context_length: int | None  # tokens of prompt and completion
    vocabulary: int | None  # ids in [0, vocabulary); None where the server's model directory can't be read here
    tensor: int = 1  # devices that it is spread over

    @property
    def streams_by_request(self) -> bool:
        return self.ours or self.release >= SPANS_AND_INTERVALS

    @property
    def retracts(self) -> bool:
        """`pause_generation` in mode retract, and a flush after it, work. SGLang 0.5.17 dies of
        that flush: it asserts an empty queue, where the retracted requests are.
        """
        return self.ours or self.release >= SPANS_AND_INTERVALS


def normalized(address: str) -> str:
    """`HOST:PORT` or a URL, as a base URL. Raises UserError."""
    base = (address if "://" in address else f"http://{address}").rstrip("/")
    found = re.fullmatch(r"https?://(?:[^/\s:]+|\[[0-9a-fA-F:]+\])(?::(\d{1,5}))?", base)
    port = found and found[1]
    if not found or (port is None and "://" not in address) or (port and not 0 < int(port) < 65536):
        raise UserError(f"rollout.addr: {address!r} is no address (HOST:PORT, several with commas between)")
    return base


def headers(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def fetch(base: str, path: str, token: str | None, timeout: float) -> Any:
    """GET, blocking. JSON, or None for an empty body.

    Raises:
      ServerLost: when nothing answers.
      UserError: when the answer is a refusal.
    """
    request = urllib.request.Request(base + path, headers=headers(token))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers are near; a proxy is not asked
    try:
        with opener.open(request, timeout=timeout) as response:
            body = response.read()
        return json.loads(body) if body else None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise UserError(f"{base}: the server wants a bearer token (set {TOKEN_VARIABLE})") from None
        raise ServerLost(f"{base}{path}: status {error.code}") from None
    except (OSError, ValueError) as error:
        raise ServerLost(f"{base}{path}: {error}") from None


def inspect(base: str, token: str | None, timeout: float = 30.0) -> tuple[Facts, int]:
    """(facts, version of its weights). Blocks. Raises ServerLost, UserError, SamplerError."""
    model = fetch(base, "/get_model_info", token, timeout)
    server = fetch(base, "/get_server_info", token, timeout)
    try:
        release = str(server["version"])
        ours = release.startswith(OURS)
        numbers = () if ours else tuple(int(n) for n in re.findall(r"\d+", release)[:3])
        # SGLang keeps the last few positions of a context for itself: so much of it is taken, and filled, always.
        context = server.get("max_req_input_len") or server.get("context_length")
        facts = Facts(
            release=numbers,
            ours=ours,
            overlapped=not server["disable_overlap_schedule"],
            context_length=int(context) if context else None,
            vocabulary=_vocabulary(str(model["model_path"])),
            tensor=int(server.get("tp_size") or 1),
        )
        return facts, version_of(str(model["weight_version"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{base}: this server does not speak SGLang's protocol ({type(error).__name__}: {error})") from None


def _vocabulary(model_path: str) -> int | None:
    """From config.json.

    SGLang on the CPU dies of an id outside the vocabulary, so the client must know.
    """
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
        return int(config["text_config"]["vocab_size"] if "text_config" in config else config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Remote:
    """A server and what the client knows of it. `usable` is set by whoever finds out."""

    def __init__(self, base: str, facts: Facts, token: str | None) -> None:
        self.base, self.facts, self._token = base, facts, token
        self.member: object = object()  # what a collective with it was made with: another process may answer after a loss
        self.load = 0  # requests of ours under way
        self.usable = True  # answers, and has the weights of the present version
        self.behind = False  # answers, but has other weights and none to take: the next publish brings it back
        self.released = False  # has lent its memory, and can be given no weights
        self.dropped = False  # not expected to come back
        self.reason = ""  # why it is not usable

    def lost(self, reason: str) -> None:
        self.usable, self.behind, self.reason = False, False, reason
        self.member = object()

    async def get(self, session: aiohttp.ClientSession, path: str, timeout: float) -> Any:
        return await self._call(session, "GET", path, None, timeout)

    async def post(self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        """The answer, as JSON where it is JSON.

        Raises:
          ServerLost: no answer, or a status from 500 on.
          UserError: the server refused, and says why.
        """
        return await self._call(session, "POST", path, body, timeout)

    async def _call(self, session: aiohttp.ClientSession, method: str, path: str, body: Any, timeout: float) -> Any:
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with session.request(
                method, self.base + path, json=body, headers=headers(self._token), timeout=limit
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerLost(f"{self.base}{path}: {describe(error)}") from error
        self._raise_for(response.status, text, path)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _raise_for(self, status: int, text: str, path: str) -> None:
        if status < 400:
            return
        message = f"{self.base}{path}: {_message(text)} (status {status})"
        if status in (401, 403):
            raise UserError(f"{self.base}: the server wants a bearer token (set {TOKEN_VARIABLE})")
        if status >= 500 or status in (408, 425, 429):
            raise ServerLost(message)
        raise UserError(message)

    async def generate(self, session: aiohttp.ClientSession, body: Mapping[str, Any], reply: Reply) -> None:
        """Streams a completion into `reply`, which keeps what has come when this raises.

        Raises:
          ServerLost: the stream didn't start or broke off.
          UserError: the server refused the request.
        """
        try:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=30)  # the caller bounds the whole
            async with session.post(
                self.base + "/generate", json=body, headers=headers(self._token), timeout=limit
            ) as response:
                if response.status >= 400:
                    self._raise_for(response.status, await response.text(), "/generate")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[len(b"data: ") :]), reply)
                    if reply.finish is not None:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, SamplerError) as error:
            raise ServerLost(f"{self.base}/generate: {describe(error)}") from error
        raise ServerLost(f"{self.base}/generate: the stream ended before the completion did")

    def _take(self, chunk: Mapping[str, Any], reply: Reply) -> None:
        if "error" in chunk:  # the status of a stream is sent before SGLang looks at the request
            error = chunk["error"] if isinstance(chunk["error"], dict) else {"message": str(chunk["error"])}
            code = error.get("code")
            self._raise_for(code if isinstance(code, int) else 400, json.dumps(chunk), "/generate")
        reason = chunk.get("meta_info", {}).get("finish_reason")
        status = reason.get("status_code") if isinstance(reason, dict) else None
        if isinstance(status, int):  # it gave up on this request, and says whose fault it is
            self._raise_for(status, str(reason.get("message")), "/generate")
        reply.add(chunk)


def session_of() -> aiohttp.ClientSession:
    """For any number of streams at once; chunks may be long.

    A connection is let go of well before the server does so: a request that meets the end of its
    connection on the way looks as if the server had died.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=SERVERS_KEEP / 2)
    return aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_LIMIT, trust_env=False)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _message(text: str) -> str:
    """What went wrong, out of the several shapes that SGLang's errors have."""
    try:
        value = json.loads(text)
        value = value.get("error", value)
        message = value["message"] if isinstance(value, dict) else value
    except (ValueError, KeyError, AttributeError, TypeError):
        message = text
    return " ".join(str(message).split())[:_ERROR_LENGTH]
