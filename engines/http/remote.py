"""A server as the client sees it: its properties, its availability, and requests to it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from rljax.engines.http.replies import Reply, version_of
from rljax.errors import SamplerError, UserError
from rljax.messaging.token import VARIABLE

SPANS_AND_INTERVALS = (0, 5, 23)  # first release of SGLang with stream_interval per request and a safe flush after a retract
OWNER = "X-Rljax-Run"  # header that names the run which publishes to a server, as "HOST process PID ID"
OWNED = 409  # status of a server that belongs to another run
OURS = "rljax"  # how the version that our server reports begins
SERVERS_KEEP = 5.0  # seconds that SGLang keeps an idle connection (uvicorn's default); our server keeps it longer
_LINE_LIMIT = 1 << 26  # bytes of one chunk
_ERROR_LENGTH = 500  # characters of a server's message shown in an error


_RUN = f"{socket.gethostname()} process {os.getpid()} {uuid.uuid4().hex}"


RESERVED = ("weight", "kvcache", "graph")  # SGLang's names


class ServerOwned(UserError):
    """Raised if another run publishes to a server."""


class ServerLost(Exception):
    """Raised if a server doesn't answer, breaks off or can't serve now; another one may."""


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """Properties of a server, read once when the client attaches to it."""

    release: tuple[int, ...]  # of SGLang; empty for ours
    ours: bool
    overlapped: bool  # a decode step may straddle a pause: rljax/engines/http/replies.py
    context_length: int | None  # tokens of prompt and completion
    vocabulary: int | None  # ids in [0, vocabulary); None if the server's model directory can't be read here
    tensor: int = 1  # devices per server
    memory: int | None = None  # bytes per device of weights, cache and graphs; None if it doesn't tell
    model_path: str = ""  # as the server was started with it: a directory of its own machine, or a name

    @property
    def streams_by_request(self) -> bool:
        return self.ours or self.release >= SPANS_AND_INTERVALS

    @property
    def retracts(self) -> bool:
        """True if `pause_generation` in mode retract works, and a cache flush after it.

        SGLang 0.5.17 dies of that flush: it asserts an empty queue, but the retracted requests are
        in it.
        """
        return self.ours or self.release >= SPANS_AND_INTERVALS


def base_url(address: str) -> str:
    """Turns `HOST:PORT` or a URL into a base URL. Raises UserError."""
    base = (address if "://" in address else f"http://{address}").rstrip("/")
    found = re.fullmatch(r"https?://(?:[^/\s:]+|\[[0-9a-fA-F:]+\])(?::(\d{1,5}))?", base)
    port = found and found[1]
    if not found or (port is None and "://" not in address) or (port and not 0 < int(port) < 65536):
        raise UserError(f"rollout.addr: {address!r} is not an address (HOST:PORT; separate several by commas)")
    return base


def headers(token: str | None) -> dict[str, str]:
    return {OWNER: _RUN} | ({"Authorization": f"Bearer {token}"} if token else {})


def fetch(base: str, path: str, token: str | None, timeout: float) -> Any:
    """Sends a GET request. Blocks. Returns the JSON, or None for an empty body.

    Raises:
      ServerLost: nothing answers.
      UserError: the server refuses.
    """
    request = urllib.request.Request(base + path, headers=headers(token))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers are near: use no proxy
    try:
        with opener.open(request, timeout=timeout) as response:
            body = response.read()
        return json.loads(body) if body else None
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise UserError(f"{base}: the server wants a bearer token (set {VARIABLE} to the server's)") from None
        raise ServerLost(f"{base}{path}: status {error.code}") from None
    except (OSError, ValueError) as error:
        raise ServerLost(f"{base}{path}: {error}") from None


def inspect(base: str, token: str | None, timeout: float = 30.0) -> tuple[ServerInfo, int]:
    """Returns a server's properties and the version of its weights. Blocks.

    Raises ServerLost, UserError, SamplerError.
    """
    model = fetch(base, "/get_model_info", token, timeout)
    server = fetch(base, "/get_server_info", token, timeout)
    try:
        release = str(server["version"])
        ours = release.startswith(OURS)
        numbers = () if ours else tuple(int(n) for n in re.findall(r"\d+", release)[:3])
        # SGLang reserves the last few positions of a context; a request may fill only the rest.
        context = server.get("max_req_input_len") or server.get("context_length")
        info = ServerInfo(
            release=numbers,
            ours=ours,
            overlapped=not server["disable_overlap_schedule"],
            context_length=int(context) if context else None,
            vocabulary=_vocabulary(str(model["model_path"])),
            tensor=int(server.get("tp_size") or 1),
            memory=_memory(server),
            model_path=str(model["model_path"]),
        )
        return info, version_of(str(model["weight_version"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{base}: this server does not speak SGLang's protocol ({type(error).__name__}: {error})") from None


def _memory(server: Mapping[str, Any]) -> int | None:
    """Returns what SGLang has reserved on a device; None for a server that doesn't say."""
    states = [state.get("memory_usage") or {} for state in server.get("internal_states") or ()]
    totals = [sum(map(_gigabytes, (usage.get(name) for name in RESERVED))) for usage in states]
    return round(max(totals) * 2**30) or None if totals else None


def _gigabytes(value: Any) -> float:
    """Returns a size in units of 2**30 bytes; some releases give one for each phase."""
    return sum(map(float, value.values())) if isinstance(value, Mapping) else float(value or 0)


def _vocabulary(model_path: str) -> int | None:
    """Reads the vocabulary size from config.json; None if that can't be read here.

    SGLang on the CPU dies of an id outside the vocabulary, so the client must know the size.
    """
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
        return int(config["text_config"]["vocab_size"] if "text_config" in config else config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class Remote:
    """A server and its status. Whoever finds it lost or recovered sets `usable`."""

    def __init__(self, base: str, info: ServerInfo, token: str | None) -> None:
        self.base, self.info, self._token = base, info, token
        self.member: object = object()  # identity of the server process, for collectives; changes with every loss
        self.load = 0  # our requests under way
        self.usable = True  # answers, and has the present weights
        self.behind = False  # answers, but has other weights and no directory to load: the next publish brings it back
        self.released = False  # has released its memory, so it can load no weights
        self.dropped = False  # not expected to come back
        self.reason = ""  # why it is not usable

    def lost(self, reason: str) -> None:
        self.usable, self.behind, self.reason = False, False, reason
        self.member = object()

    async def get(self, session: aiohttp.ClientSession, path: str, timeout: float) -> Any:
        return await self._call(session, "GET", path, None, timeout)

    async def post(self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        """Posts a body; returns the answer, parsed if it is JSON.

        Raises:
          ServerLost: no answer, or a status of 500 or above.
          UserError: the server refused; the message says why.
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
            raise UserError(f"{self.base}: the server wants a bearer token (set {VARIABLE} to the server's)")
        if status == OWNED:
            raise ServerOwned(f"rollout.addr: {self.base}: {_message(text)} (a server belongs to one run at a time)")
        if status >= 500 or status in (408, 425, 429):
            raise ServerLost(message)
        raise UserError(message)

    async def generate(self, session: aiohttp.ClientSession, body: Mapping[str, Any], reply: Reply) -> None:
        """Streams a completion into `reply`, which keeps the tokens so far if this raises.

        Raises:
          ServerLost: the stream didn't start or broke off.
          UserError: the server refused the request.
        """
        try:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=30)  # the caller limits the total
            async with session.post(
                self.base + "/generate", json=body, headers=headers(self._token), timeout=limit
            ) as response:
                if response.status >= 400:
                    self._raise_for(response.status, await response.text(), "/generate")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._add_chunk(json.loads(line[len(b"data: ") :]), reply)
                    if reply.finish is not None:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, SamplerError) as error:
            raise ServerLost(f"{self.base}/generate: {describe(error)}") from error
        raise ServerLost(f"{self.base}/generate: the stream ended before the completion did")

    def _add_chunk(self, chunk: Mapping[str, Any], reply: Reply) -> None:
        if "error" in chunk:  # SGLang sends the status of a stream before it checks the request
            error = chunk["error"] if isinstance(chunk["error"], dict) else {"message": str(chunk["error"])}
            code = error.get("code")
            self._raise_for(code if isinstance(code, int) else 400, json.dumps(chunk), "/generate")
        reason = chunk.get("meta_info", {}).get("finish_reason")
        status = reason.get("status_code") if isinstance(reason, dict) else None
        if isinstance(status, int):  # the server gave up on this request; the status says whose fault it is
            self._raise_for(status, str(reason.get("message")), "/generate")
        reply.add(chunk)


def make_session() -> aiohttp.ClientSession:
    """Makes a client session for any number of concurrent streams, with long chunks.

    Idle connections are closed well before the server would close them: a request that crosses the
    server's close looks as if the server had died.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=SERVERS_KEEP / 2)
    return aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_LIMIT, trust_env=False)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _message(text: str) -> str:
    """Extracts the message from any of the several shapes of SGLang's errors."""
    try:
        value = json.loads(text)
        value = value.get("error", value)
        message = value["message"] if isinstance(value, dict) else value
    except (ValueError, KeyError, AttributeError, TypeError):
        message = text
    return " ".join(str(message).split())[:_ERROR_LENGTH]
