"""The client, the launcher and the broadcast against a real SGLang server, on the CPU in float32."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
import psutil
import pytest

from rljax.config.allocation import Pool
from rljax.engine import ExportToSampler, WeightsInDirectory, WeightSource
from rljax.engines.http.client import HttpSampler
from rljax.engines.http.launcher import SglangServers
from rljax.engines.http.remote import Remote, inspect
from rljax.errors import UserError
from rljax.hf.tokenizer import load_tokenizer
from rljax.testing.models import VOCABULARY, config_of, make_model
from rljax.testing.sampler_contract import SamplerContract, publish
from rljax.types import Completion, Finish, Request, SamplingParams
from tests.shared import sglang_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONTEXT = 512


class Servers:
    """Two real servers for all tests of this module, of models 0 and 1, and both in transformers."""

    def __init__(self) -> None:
        self.root = TemporaryDirectory()
        self.models = [make_model(Path(self.root.name) / str(seed), seed=seed, max_position_embeddings=1024) for seed in (0, 1)]
        self.started = self.start(self.models)

    def start(self, models: list[Path], **options: object) -> list[SglangServers]:
        config = config_of(
            **{
                "sglang.python": sglang_python(),
                "sglang.device": "cpu",
                "sglang.dtype": "float32",
                "sglang.attention_backend": "torch_native",
                "sglang.context_length": CONTEXT,
                "sglang.disable_overlap_schedule": True,
                "sglang.extra_args": ("--max-total-tokens", "16384", "--max-running-requests", "16"),
                "sglang.log_dir": self.root.name,
                **options,
            }
        )
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda directory: SglangServers(config, Pool("sglang"), directory), models))

    def client(self, model: int, context: int = CONTEXT - 6, **options: object) -> HttpSampler:
        return client_of(self.started[model], context, **options)

    def source(self, model: int) -> WeightSource:
        return WeightsInDirectory(self.models[model])

    def close(self) -> None:
        for servers in self.started:
            servers.close()
        self.root.cleanup()


def client_of(started: SglangServers, context: int = CONTEXT - 6, **options: object) -> HttpSampler:
    """Makes a client. SGLang reserves the last six positions of a context.

    With `context` the client may use less of it.
    """
    base, token = started.remotes[0].base, started.remotes[0]._token
    info, version = inspect(base, token)
    assert info.context_length == CONTEXT - 6
    remote = Remote(base, dataclasses.replace(info, context_length=context), token)
    return HttpSampler([remote], version=version, **options)


@pytest.fixture(scope="module")
def servers():
    servers = Servers()
    yield servers
    servers.close()


class TestSglang(SamplerContract):
    vocabulary = VOCABULARY
    context = 100
    tolerance = 1e-3
    reproducible = False  # seeds count with deterministic inference only, which SGLang doesn't have on the CPU
    servers: ClassVar[Servers]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _servers(cls, servers):
        cls.servers = servers

    def make(self, model):
        return self.servers.client(model, self.context)

    def source(self, model):
        return self.servers.source(model)

    def text(self, token_ids):
        return load_tokenizer(self.servers.models[0]).decode(token_ids, skip_special_tokens=False)

    def request(self, name, prompt=None, *, seed=0, **params):
        """Makes a greedy request, for the tests that need the same completion twice."""
        if name in ("free", "ended", "long", "short"):
            params = {"greedy": True} | params
        return super().request(name, prompt, seed=seed, **params)

    @pytest.mark.skip(reason="left out: SGLang heeds seeds in deterministic inference only, which it doesn't have on the CPU")
    def test_a_seed_gives_the_same_completion_and_another_seed_another(self):
        pass

    @pytest.mark.skip(reason="left out: SGLang's log-probs are of the whole softmax, which the documentation says")
    def test_truncated_sampling_gives_one_kept_token_probability_one(self):
        pass

    async def _swap_under(self, sampler, request, delay):
        return await super()._swap_under(sampler, request, delay + 0.02)


# What a swap under a request really does: log-probs of every token, from transformers


@pytest.fixture(scope="module")
def oracle(servers):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    nets = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in servers.models]

    def logp(model: int, ids: np.ndarray, temperature: float, cache=None):
        """([T] log-probs of the token behind each position, cache)."""
        with torch.no_grad():
            out = nets[model](torch.tensor(ids[None].astype(np.int64)), past_key_values=cache, use_cache=True)
        return (out.logits[0] / temperature).log_softmax(-1).numpy(), out.past_key_values

    return logp


PROMPT = np.array([5, 6, 7, 8, 9, 10, 11, 12], np.int32)


def expected(oracle, completion: Completion, temperature: float, *, recompute: bool) -> np.ndarray:
    """Computes log-probs of a completion whose first tokens are model 0's and the others model 1's."""
    ids = np.concatenate([PROMPT, completion.token_ids])
    kept = len(PROMPT) + int((completion.versions == completion.versions[0]).sum())
    before, cache = oracle(0, ids[: kept - 1], temperature)
    if recompute:
        rows = np.concatenate([before, oracle(1, ids[:-1], temperature)[0][kept - 1 :]])
    else:
        rows = np.concatenate([before, oracle(1, ids[kept - 1 : -1], temperature, cache)[0]])
    return np.take_along_axis(rows, ids[1:, None].astype(int), axis=1)[len(PROMPT) - 1 :, 0]


async def swapped_under(sampler: HttpSampler, servers: Servers) -> Completion:
    """Samples a long completion of model 0, with a publish of model 1 in its middle on any machine."""
    request = Request("swap", PROMPT, SamplingParams(400, temperature=0.7), seed=1)
    delay = 0.2
    for _ in range(40):
        await publish(sampler, servers.source(0), sampler.version + 1)
        task = asyncio.create_task(sampler.generate(request))
        await asyncio.sleep(delay)
        await publish(sampler, servers.source(1), sampler.version + 1)
        completion = await task
        old = int((completion.versions == sampler.version - 1).sum())
        if 3 < old < 397:
            await publish(sampler, servers.source(0), sampler.version + 1)
            return completion
        delay *= 1.7 if old <= 3 else 0.6
    raise AssertionError("no swap fell into the completion")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_swap_changes_log_probs_at_the_token_where_the_version_changes(servers, oracle, recompute):
    async def run() -> Completion:
        sampler = servers.client(0, recompute=recompute)
        completion = await swapped_under(sampler, servers)
        await sampler.close()
        return completion

    completion = asyncio.run(run())
    assert len(completion.token_ids) == 400 and completion.finish is Finish.LENGTH
    assert completion.versions[-1] == completion.versions[0] + 1
    want = expected(oracle, completion, 0.7, recompute=recompute)
    np.testing.assert_allclose(completion.logp, want, atol=1e-3)
    wrong = expected(oracle, completion, 0.7, recompute=not recompute)
    assert np.abs(completion.logp - wrong).max() > 1e-2


def test_overlap_scheduling_reports_the_boundary_one_token_early_and_that_is_undone(servers, oracle):
    (started,) = servers.start(servers.models[:1], **{"sglang.disable_overlap_schedule": False})

    async def run() -> Completion:
        sampler = client_of(started)
        completion = await swapped_under(sampler, servers)
        await sampler.close()
        return completion

    try:
        assert started.remotes[0].info.overlapped
        completion = asyncio.run(run())
    finally:
        started.close()
    np.testing.assert_allclose(completion.logp, expected(oracle, completion, 0.7, recompute=False), atol=1e-3)
    early = np.minimum(completion.versions.max(), np.append(completion.versions[1:], completion.versions[-1]))
    as_reported = expected(oracle, dataclasses.replace(completion, versions=early), 0.7, recompute=False)
    assert np.abs(completion.logp - as_reported).max() > 1e-2


@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_buckets_from_memory_equal_a_load_from_the_directory(servers, oracle, transport):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from rljax.engines.cuda.transports.routes import Route

    tensors = {k: v for file in servers.models[1].glob("*.safetensors") for k, v in load_file(file).items()}
    largest = max(tensor.nbytes for tensor in tensors.values())
    request = Request("after", PROMPT, SamplingParams(20, temperature=0.7), seed=1)

    async def run() -> list[Completion]:
        sampler = servers.client(0)
        route = Route(ExportToSampler(transport, Pool("sglang")), bucket_bytes=largest)
        done = []
        for _ in range(2):  # the group is made once
            await publish(sampler, servers.source(0), sampler.version + 1)
            flying = asyncio.create_task(sampler.generate(Request("under", PROMPT, SamplingParams(300), seed=1)))
            await asyncio.sleep(0.3)
            await publish(sampler, route.source(tensors.items()), sampler.version + 1)
            done += [await sampler.generate(request), await flying]
        route.close()
        await publish(sampler, servers.source(0), sampler.version + 1)
        await sampler.close()
        return done

    assert torch.distributed.is_available()
    for after, under in zip(*[iter(asyncio.run(run()))] * 2, strict=True):
        ids = np.concatenate([PROMPT, after.token_ids])
        rows, _ = oracle(1, ids[:-1], 0.7)
        want = np.take_along_axis(rows, ids[1:, None].astype(int), axis=1)[len(PROMPT) - 1 :, 0]
        np.testing.assert_allclose(after.logp, want, atol=1e-3)
        assert set(after.versions) == {under.versions[-1]} and under.versions[-1] == under.versions[0] + 1


def test_an_id_outside_the_vocabulary_is_refused_before_it_kills_the_server(servers):
    async def run() -> None:
        sampler = servers.client(0)
        with pytest.raises(UserError, match="vocabulary"):
            await sampler.generate(Request("bad", np.array([3, VOCABULARY], np.int32), SamplingParams(2), seed=0))
        assert len((await sampler.generate(Request("good", PROMPT, SamplingParams(2), seed=0))).token_ids) == 2
        await sampler.close()

    asyncio.run(run())


def test_a_killed_server_is_started_again_with_the_present_weights_and_loses_nothing(servers, oracle, tmp_path):
    """Runs last, for it kills the second server.

    Requests wait for the only server, and continue behind their tokens.
    """
    started = servers.started[1]
    remote = started.remotes[0]

    async def run() -> list[Completion]:
        sampler = HttpSampler([remote], version=inspect(remote.base, remote._token)[1], replicas=started)
        for name in ("published", "next"):
            os.symlink(servers.models[0], tmp_path / name)
        await publish(sampler, WeightsInDirectory(tmp_path / "published"), sampler.version + 1)
        os.unlink(tmp_path / "published")  # as a publisher does
        tasks = [
            asyncio.create_task(sampler.generate(Request(f"k#{i}", PROMPT, SamplingParams(300, temperature=0.7), seed=i)))
            for i in range(4)
        ]
        await asyncio.sleep(0.5)
        process_of_reaper = psutil.Process(started._processes[0].reaper.pid)
        for process in process_of_reaper.children(recursive=True):
            os.kill(process.pid, signal.SIGKILL)
        done = list(await asyncio.gather(*tasks))
        assert not (tmp_path / "published").exists()
        await sampler.close()
        return done

    for completion in asyncio.run(run()):
        ids = np.concatenate([PROMPT, completion.token_ids])
        rows, _ = oracle(0, ids[:-1], 0.7)
        want = np.take_along_axis(rows, ids[1:, None].astype(int), axis=1)[len(PROMPT) - 1 :, 0]
        assert len(completion.token_ids) == 300
        np.testing.assert_allclose(completion.logp, want, atol=1e-3)
        assert len(set(completion.versions)) == 1
