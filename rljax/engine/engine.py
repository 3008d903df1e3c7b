"""The pair of a sampler and a learner: publishing, and memory lent for an update."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from rljax import tracing
from rljax.engine import storage
from rljax.engine.interface import Learner, Sampler
from rljax.engine.weights import ExportTarget, ExportToDirectory, ExportToSampler, WeightsInDirectory, WeightSource
from rljax.errors import SamplerError

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Engine:
    """A sampler, a learner, and the transport of weights from one to the other.

    Example:
      Engine(sampler, learner, ExportToSampler("memory", Pool("jax")), Path("/dev/shm/rljax-5c2e"))
    """

    sampler: Sampler
    learner: Learner
    in_memory: ExportToSampler | None  # export of every publish; None: publish through publish_dir
    publish_dir: Path  # directory for published weights; memory-backed if possible

    async def publish(self, version: int) -> None:
        """Makes the learner's weights the sampler's, as version `version`.

        Requests in flight pause between two decode steps, then go on.

        If loading from memory fails because a part of the sampler died, the weights are published
        through a directory instead, and parts that come back read them later. The sampler stays
        paused in between; if the directory fails too, it stays paused and the error is raised.

        Raises:
          SamplerError: the weights could not be published.
          UserError: there is no room for them, or no sampler takes them.
        """
        target = self.in_memory or self._directory_of(version)
        with tracing.span("export"):
            source = await self._export(target)
        with tracing.span("pause"):
            await self.sampler.pause()
        whole = True  # False while parts of the sampler may have a mix of new and old weights
        try:
            try:
                with tracing.span("load weights", version=version):
                    await self.sampler.load_weights(source, version)
            except SamplerError as error:
                if self.in_memory is None:
                    raise
                log.warning("publishing by %s failed, now through a directory: %s", self.in_memory.transport, error)
                whole = False
                source = await self._export(self._directory_of(version))
                await self.sampler.load_weights(source, version)
                whole = True
        finally:
            if whole:
                with tracing.span("resume"):
                    await self.sampler.resume()
        if isinstance(source, WeightsInDirectory):
            await asyncio.to_thread(shutil.rmtree, source.directory)

    async def _export(self, target: ExportTarget) -> WeightSource:
        try:
            return await asyncio.to_thread(self.learner.export, target)
        except Exception as error:
            if (full := storage.no_room(error, self.publish_dir)) is None:
                raise
            raise full from error

    def _directory_of(self, version: int) -> ExportTarget:
        storage.require_private(self.publish_dir)
        return ExportToDirectory(self.publish_dir / str(version))

    @contextlib.asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """Context of an update, in which a sampler on the same devices may lend its memory.

        It lends it if the config asks for that. A publish comes next.
        """
        if not self.sampler.lends:
            yield
            return
        await self.sampler.release()
        try:
            yield
        finally:
            await self.sampler.reclaim()

    async def lacks_weights(self) -> None:
        """Returns once a part of the sampler waits for a publish; never if that can't happen."""
        await self.sampler.lacks_weights()

    async def close(self) -> None:
        """Closes both sides and deletes published weights, whatever either side raises."""
        try:
            await self.sampler.close()
        finally:
            try:
                await asyncio.to_thread(self.learner.close)
            finally:
                await asyncio.to_thread(storage.remove_private, self.publish_dir)
