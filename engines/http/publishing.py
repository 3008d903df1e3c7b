"""Publishing to servers: weights travel by a directory that they load, or by a broadcast."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from rljax.engine import Sender, WeightsBroadcast, WeightsInDirectory, WeightSource
from rljax.engines.http.calls import Calls
from rljax.engines.http.interfaces import PostTo
from rljax.engines.http.published_weights import PublishedWeights
from rljax.engines.http.remote import Remote, ServerLost
from rljax.errors import SamplerError, UserError


class Publishing:
    """Loads of weights on paused servers, and the weights kept for servers that restart."""

    def __init__(self, calls: Calls, *, recompute: bool) -> None:
        """
        Args:
          recompute: `rollout.recompute_kv_on_publish`.
        """
        self._calls, self._recompute = calls, recompute
        self._published = PublishedWeights()

    def pause_mode(self, remote: Remote) -> str:
        """Returns SGLang's pause mode.

        Old servers can't recompute the cache of running requests: those are aborted, and the
        sampler submits the rest of each again.
        """
        if not self._recompute:
            return "in_place"
        return "retract" if remote.info.retracts else "abort"

    def _flushes(self, remote: Remote) -> bool:
        """Returns whether the server's cache is flushed after a load.

        Only after a retract: in any other mode running requests still use the cache. A retracted
        request keeps its prefix in SGLang's cache until the flush.
        """
        return self._recompute and remote.info.retracts

    async def load(self, source: WeightSource, remotes: Sequence[Remote], version: int) -> list[Remote]:
        """Loads weights on servers, and returns those that have them.

        Raises:
          UserError: no server accepts the weights, or they are arrays of this process.
          SamplerError: no server is left.
        """
        match source:
            case WeightsInDirectory(directory):
                return await self._load_directory(directory, remotes, version)
            case WeightsBroadcast(sender):
                current = await self._broadcast(sender, remotes, version)
                await self.drop()
                return current
            case _:
                raise UserError("a server can't load arrays of this process (publish by a directory or a broadcast)")

    def directory_of(self, version: int) -> str | None:
        """Returns a directory with the weights of a version, or None."""
        return self._published.directory_of(version)

    async def drop(self) -> None:
        """Removes the weights that are kept."""
        await asyncio.to_thread(self._published.drop)

    async def _load_directory(self, directory: Path, remotes: Sequence[Remote], version: int) -> list[Remote]:
        try:
            prepared = await asyncio.to_thread(self._published.prepare, directory, version)
        except OSError as error:
            raise UserError(f"{directory}: weights can't be read: {error}") from error
        try:
            current = await self._calls.each(lambda remote: self._load_one(remote, str(directory), version), remotes)
        except BaseException as error:
            await asyncio.to_thread(shutil.rmtree, prepared, ignore_errors=True)
            if isinstance(error, UserError):
                remedy = "rollout.publish_dir names a directory that all servers can read"
                raise UserError(f"{error}; the weights are in {directory} ({remedy})") from None
            raise
        await asyncio.to_thread(self._published.keep, prepared, version)
        return current

    async def _load_one(self, remote: Remote, directory: str, version: int) -> None:
        body = {"model_path": directory, "weight_version": str(version), "flush_cache": self._flushes(remote)}
        await self._calls.post(remote, "/update_weights_from_disk", body)

    async def _broadcast(self, sender: Sender, remotes: Sequence[Remote], version: int) -> list[Remote]:
        if not remotes:
            raise SamplerError(f"publishing version {version}: no server is left for the broadcast")
        try:
            posts = [PostTo(self._calls.post_unless_lost, remote, remote.member) for remote in remotes]
            await sender.send(posts, version, flush=all(map(self._flushes, remotes)))
        except ServerLost as error:
            raise SamplerError(f"publishing version {version}: {error}") from error
        return list(remotes)
