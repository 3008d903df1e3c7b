"""Our server and its client, under the contract of all samplers."""

from __future__ import annotations

import asyncio
import functools
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from rljax.config.allocation import Pool
from rljax.engine import Sampler, WeightsInDirectory
from rljax.engines.http.client import HttpSampler
from rljax.engines.http.remote import Remote, inspect
from rljax.engines.http.server import SamplerServer, ServerOptions
from rljax.engines.jax.sampling.sampler import JaxSampler
from rljax.hf.tokenizer import load_tokenizer
from rljax.testing.models import VOCABULARY, config_of, make_model
from rljax.testing.sampler_contract import Loop, SamplerContract


@functools.cache
def models() -> tuple[TemporaryDirectory, list[Path]]:
    root = TemporaryDirectory()
    return root, [make_model(Path(root.name) / str(seed), seed=seed) for seed in (0, 1)]


class Served(HttpSampler):
    """A client that closes its server when it is closed."""

    server: SamplerServer
    behind: Sampler
    server_loop: Loop

    async def close(self) -> None:
        await super().close()

        async def stop() -> None:
            await self.server.close()
            await self.behind.close()

        if self.server_loop is not None:
            loop, self.server_loop = self.server_loop, None
            await asyncio.to_thread(loop.run, stop())
            threading.Thread(target=loop.close).start()


class TestOurServer(SamplerContract):
    vocabulary = VOCABULARY

    def make(self, model):
        behind = JaxSampler(config_of(), Pool("jax"), models()[1][model])
        options = ServerOptions(str(models()[1][model]), [Path(models()[0].name)], context_length=self.context)
        loop = Loop()
        server = SamplerServer(behind, options)
        host, port = loop.run(server.start("127.0.0.1", 0))
        base = f"http://{host}:{port}"
        info, version = inspect(base, None)
        assert version == 0
        client = Served([Remote(base, info, None)], version=0)
        client.server, client.behind, client.server_loop = server, behind, loop
        return client

    def source(self, model):
        return WeightsInDirectory(models()[1][model])

    def text(self, token_ids):
        return load_tokenizer(models()[1][0]).decode(token_ids, skip_special_tokens=False)
