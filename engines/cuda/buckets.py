"""Weights on their way to servers in buckets: what the ways that need no directory have in common.

    POST /begin_weight_update    ------>     (SGLang 0.5.23; older ones have no such endpoint, and need none)
    a bucket, however it travels ======>     (as often as there are buckets; the version comes with the last)
    POST /end_weight_update      ------>

Tensors are taken from the iterable as they are sent: a sharded learner gathers them one at a time,
and never holds more than a bucket and the tensor behind it.
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
OPEN = "already open"  # in SGLang's answer to a second begin

T = TypeVar("T")
Bucket = list[tuple[str, "torch.Tensor"]]
Label = dict[str, Any]
"""What goes with a bucket: the version with the last one, and whether the cache is flushed behind it."""


async def send_buckets(
    posts: Sequence[Post],
    buckets: Iterator[tuple[T, bool]],
    version: int,
    *,
    flush: bool,
    send: Callable[[T, Label], Awaitable[None]],
) -> None:
    """Sends one bucket after the other, between the two calls that 0.5.23 wants around them.

    Raises what `send` raises.
    """
    sessions = await _begin(posts)
    try:
        while (found := await asyncio.to_thread(next, buckets, None)) is not None:
            bucket, last = found
            del found
            await send(bucket, {"weight_version": str(version), "flush_cache": flush} if last else {"flush_cache": False})
            del bucket  # before the next one is made
    except BaseException:
        if sessions:
            await _end_anyway(posts)
        raise
    if sessions:
        await on_all(posts, "/end_weight_update", {})


async def _end_anyway(posts: Sequence[Post]) -> None:
    """Closes the sessions of a publish that failed, for servers would not take weights from a
    directory in them, as far as they answer: one may be dead, another wait in a collective.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_TIMEOUT):
            await asyncio.gather(*(post("/end_weight_update", {}) for post in posts), return_exceptions=True)


async def _begin(posts: Sequence[Post]) -> bool:
    """Opens a session on all servers. False where they know no sessions."""

    async def begin(post: Post) -> None:
        try:
            await post("/begin_weight_update", {})
        except UserError as error:
            if OPEN not in str(error):
                raise
            await post("/end_weight_update", {})  # of a publish that broke off
            await post("/begin_weight_update", {})

    try:
        await asyncio.gather(*map(begin, posts))
    except UserError as error:
        if "status 404" in str(error):
            return False
        raise
    return True


def buckets_of(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[tuple[Bucket, bool]]:
    """In order, each of at most `limit` bytes or one tensor; and whether it is the last."""
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
