"""Sends weights to servers in buckets: what the transports through memory have in common.

    POST /begin_weight_update    ------>     (SGLang 0.5.23; older ones have no such endpoint)
    a bucket, by any transport   ======>     (once per bucket; the version comes with the last)
    POST /end_weight_update      ------>

Tensors are taken from the iterable as they are sent: a sharded learner gathers them one at a time,
and has at most one bucket and the next tensor in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rljax.engine import Post
from rljax.errors import UserError

if TYPE_CHECKING:
    import torch

BUCKET = 512 << 20  # bytes
END_TIMEOUT = 10.0  # seconds
OPEN = "already open"  # part of SGLang's answer if a session is open

T = TypeVar("T")
Bucket = list[tuple[str, "torch.Tensor"]]
Label = dict[str, Any]
"""Fields posted with a bucket: the version with the last one, and whether to flush the cache after it."""


async def send_buckets(
    posts: Sequence[Post],
    buckets: Iterator[tuple[T, bool]],
    version: int,
    *,
    flush: bool,
    send: Callable[[T, Label], Awaitable[None]],
) -> None:
    """Sends the buckets in order, between the two session calls of SGLang 0.5.23.

    Raises what `send` raises.
    """
    sessions = await _begin(posts)
    try:
        while (found := await asyncio.to_thread(next, buckets, None)) is not None:
            bucket, last = found
            del found
            await send(bucket, {"weight_version": str(version), "flush_cache": flush} if last else {"flush_cache": False})
            del bucket  # free it before the next one is made
    except BaseException:
        if sessions:
            await _end_anyway(posts)
        raise
    if sessions:
        await on_all(posts, "/end_weight_update", {})


async def _end_anyway(posts: Sequence[Post]) -> None:
    """Closes the sessions of a publish that failed, on servers that still answer.

    In an open session a server would load no weights from a directory. Waits for END_TIMEOUT at
    most: one server may be dead, another may hang in a collective.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_TIMEOUT):
            await asyncio.gather(*(post("/end_weight_update", {}) for post in posts), return_exceptions=True)


async def _begin(posts: Sequence[Post]) -> bool:
    """Opens a session on all servers. Returns False if they have no sessions."""

    async def begin(post: Post) -> None:
        try:
            await post("/begin_weight_update", {})
        except UserError as error:
            if OPEN not in str(error):
                raise
            await post("/end_weight_update", {})  # a session left over from a publish that failed
            await post("/begin_weight_update", {})

    try:
        await asyncio.gather(*map(begin, posts))
    except UserError as error:
        if "status 404" in str(error):
            return False
        raise
    return True


def buckets_of(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[tuple[Bucket, bool]]:
    """Yields buckets of at most `limit` bytes, or of one tensor, and whether each is the last."""
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            full, bucket, size = bucket, [], 0
            yield full, False
            del full
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket, True


async def on_all(posts: Sequence[Post], path: str, body: dict[str, Any]) -> None:
    await asyncio.gather(*(post(path, body) for post in posts))
