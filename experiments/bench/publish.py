"""A publish from a learner to a sampler: seconds, by transport.

python -m experiments.bench.publish --sglang_python=PYTHON              # one GPU: directory, ipc
python -m experiments.bench.publish --sglang_python=PYTHON --modes=sglang:d1+fsdp:d1   # two: nccl
python -m experiments.bench.publish --sglang_python=PYTHON --modes=sglang:d2+fsdp:f2 --decoding=256
python -m experiments.bench.publish --sglang_python=PYTHON --device=cpu --sizes=tiny

Pause and resume are included. Models have random weights, in bfloat16. Each transport publishes
--repeats times after one that is not counted (it makes the group, and fills caches); the figure is
the median. "export" is the learner's part before the server pauses: all of the way into
memory-backed storage for a directory, nothing for the others. With --decoding so many requests are
under way all the time. After the last publish the versions and log-probs of all servers are looked
at: they must be those of the weights that were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.config.allocation import Allocation
    from rljax.config.schema import Config
    from rljax.engine import Engine, ExportTarget, Learner, Sampler, WeightSource

PYTHON = flags.DEFINE_string("sglang_python", "", "The interpreter that has SGLang; empty: this one.")
DEVICE = flags.DEFINE_enum("device", "cuda", ["cuda", "cpu"], "Device of servers and learner.")
MODES = flags.DEFINE_list("modes", ["sglang:d1|fsdp:d1"], "allocation_mode of each pair; on the CPU, | is +.")
SIZES = flags.DEFINE_list("sizes", ["135m", "0.6b"], "Models: tiny, 135m (SmolLM2's shapes), 0.6b and 1.7b (Qwen3's).")
TRANSPORTS = flags.DEFINE_list("transports", [], "Some of directory, memory, ipc, nccl, gloo; empty: all that are possible.")
DECODING = flags.DEFINE_integer("decoding", 0, "Requests that the servers decode meanwhile.", lower_bound=0)
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed publishes.", lower_bound=1)
BUCKET_MB = flags.DEFINE_integer("bucket_mb", 512, "Bucket size of ipc, nccl and gloo, MB.", lower_bound=1)
SERVER_ARGS = flags.DEFINE_list("server_args", [], "More flags of sglang.launch_server.")
JSON = flags.DEFINE_string("json", "", "File for the rows; empty: none.")

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(architecture="qwen3", hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2)
    | dict(head_dim=16, tie_word_embeddings=True, vocab_size=512),
    "135m": dict(architecture="llama", hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3)
    | dict(head_dim=64, tie_word_embeddings=True, vocab_size=49152),
    "0.6b": dict(architecture="qwen3", hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8)
    | dict(head_dim=128, tie_word_embeddings=True, vocab_size=151936),
    "1.7b": dict(architecture="qwen3", hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, num_kv_heads=8)
    | dict(head_dim=128, tie_word_embeddings=True, vocab_size=151936),
}
PROMPT, NEW_TOKENS, LONG = (5, 6, 7, 8), 16, 512
CONTEXT = 1024


def bench() -> None:
    from rljax.errors import UserError

    unknown = set(SIZES.value) - set(SHAPES)
    if unknown:
        raise UserError(f"--sizes: no {unknown.pop()} ({', '.join(SHAPES)})")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in SIZES.value:
            directory = Path(scratch) / size
            make_models(size, directory)
            for mode in MODES.value:
                try:
                    rows += asyncio.run(_of_mode(mode, size, directory))
                except Exception as error:  # a model that doesn't fit must not lose the others
                    print(f"{size}, {mode}: left out: {type(error).__name__}: {error}", flush=True)
    print(f"\n{where()}; medians of {REPEATS.value}, {DECODING.value} requests being decoded")
    print(
        f"{'model':6s} {'mode':20s} {'transport':10s} {'MB':>8s} {'seconds':>8s} {'export':>8s} {'GB/s':>6s}"
        f"  {'log-prob error':>14s}"
    )
    for row in rows:
        print(
            f"{row['model']:6s} {row['mode']:20s} {row['transport']:10s} {row['bytes'] / 1e6:8.1f} {row['seconds']:8.3f} "
            f"{row['export']:8.3f} {row['bytes'] / row['seconds'] / 1e9:6.2f}  {row['error']:14.1e}"
        )
    if JSON.value:
        Path(JSON.value).write_text(json.dumps({"where": where(), "rows": rows}, indent=1))
    if not rows:
        raise UserError("nothing could be measured (the lines above say why)")


def where() -> str:
    """Returns the card or processor, and the versions, as text."""
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or platform.machine()
    from rljax.engines.http.config import SglangConfig
    from rljax.engines.http.launcher import installed_release, interpreter

    if not any("sglang" in mode for mode in MODES.value):
        return f"{device}, torch {torch.__version__}"
    release = ".".join(map(str, installed_release(interpreter(SglangConfig.of(_config("fsdp:d1", Path(), ""))))))
    return f"{device}, torch {torch.__version__}, sglang {release}, bucket {BUCKET_MB.value} MB"


def make_models(size: str, directory: Path) -> None:
    """Writes models of other weights for servers and learner.

    So a publish that does nothing is noticed.
    """
    from rljax.config.schema import ModelConfig
    from rljax.hf import init_directory
    from rljax.hf.tokenizer import build_char_tokenizer

    shape = dict(SHAPES[size])
    vocabulary = shape.pop("vocab_size")
    model = ModelConfig(**shape, max_position_embeddings=2048, initializer_range=0.02, tokenizer="char")
    for seed, name in enumerate(("server", "learner")):
        init_directory(model, directory / name, seed=seed, vocab_size=vocabulary, eos_token_ids=[2], dtype="bfloat16")
        build_char_tokenizer(directory / name)


async def _of_mode(mode: str, size: str, directory: Path) -> list[dict[str, Any]]:
    from rljax.engine import allocate, check, find_plugin, prepare
    from rljax.errors import RankFailed, UserError

    config = _config(mode, directory / "server", "")
    pools = allocate(config)
    if pools.sampler is None or pools.learner is None:
        raise UserError(f"--modes: {mode} needs a sampler and a learner")
    check(config, pools)
    prepare(pools)
    plugin = find_plugin(pools.sampler.engine)
    started = time.perf_counter()
    sampler = await asyncio.to_thread(plugin.make_sampler, config, pools.sampler, directory / "server")
    print(f"{size}, {mode}: servers ready after {time.perf_counter() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    try:
        for transport in TRANSPORTS.value or possible(config, pools):
            try:
                version = 1000 * (len(rows) + 1)
                if rows:  # else a publish that does nothing would not be noticed
                    await _give_back(sampler, directory / "server", version - 1)
                rows.append(await _of_transport(transport, size, mode, directory / "learner", sampler, version))
                print(json.dumps(rows[-1]), flush=True)
            except (UserError, RankFailed, RuntimeError, OSError) as error:
                print(f"{size}, {mode}, {transport}: left out: {type(error).__name__}: {error}", flush=True)
    finally:
        await sampler.close()
    return rows


async def _give_back(sampler: Sampler, model_dir: Path, version: int) -> None:
    """Loads the servers' own weights again."""
    from rljax.engine import WeightsInDirectory

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rljax-bench-") as scratch:
        copy = Path(scratch) / str(version)  # a load may take its directory away
        shutil.copytree(model_dir, copy)
        await sampler.pause()
        await sampler.load_weights(WeightsInDirectory(copy), version)
        await sampler.resume()


def possible(config: Config, pools: Allocation) -> list[str]:
    """Returns the transports that sampler and learner have in common, the sampler's best first."""
    from rljax.engine import find_plugin
    from rljax.engine.plugins import MEMORY

    assert pools.sampler is not None and pools.learner is not None
    sampler, learner = pools.sampler.engine, pools.learner.engine
    taken, given = (find_plugin(name).routes(config, pools) for name in (sampler, learner))
    return [transport for transport in taken if transport in given and (transport != MEMORY or sampler == learner)]


async def _of_transport(
    transport: str, size: str, mode: str, model_dir: Path, sampler: Sampler, version: int
) -> dict[str, Any]:
    with _learner(_config(mode, model_dir, transport), model_dir) as learner:
        timed = Timed(learner)
        seconds, exports, before, error = await _published(timed, mode, transport, sampler, version)
    numbers = {"seconds": float(np.median(seconds[1:])), "least": min(seconds[1:]), "first": seconds[0]}
    sent = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return {
        "model": size,
        "mode": mode,
        "transport": transport,
        "decoding": DECODING.value,
        "bytes": sent,
        "export": float(np.median(exports[1:])),
        "before": before,
        "error": error,
    } | numbers


@contextlib.contextmanager
def _learner(config: Config, model_dir: Path) -> Iterator[Learner]:
    from rljax.engine import allocate
    from rljax.experiments.bench.ranks import learner_of

    pool = allocate(config).learner
    assert pool is not None
    with tempfile.TemporaryDirectory() as scratch, learner_of(config, pool, model_dir, Path(scratch)) as learner:
        yield learner


async def _published(
    learner: Timed, mode: str, transport: str, sampler: Sampler, version: int
) -> tuple[list[float], list[float], float, float]:
    """Returns seconds per publish and per export, and the log-prob errors before and after.

    Raises RuntimeError if a publish fell back to a directory.
    """
    from rljax.config.allocation import parse
    from rljax.engine import Engine, ExportToSampler, find_plugin

    pool = parse(mode, find_plugin).sampler
    assert pool is not None
    in_memory = None if transport == "directory" else ExportToSampler(transport, pool)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rljax-bench-") as publish_dir:
        engine = Engine(sampler, learner, in_memory, Path(publish_dir))
        seconds, exports, before = [], [], await _difference(engine, pool.data)
        async with decoding(sampler, DECODING.value):
            for repeat in range(1 + REPEATS.value):
                start = time.perf_counter()
                await engine.publish(version + repeat)
                seconds.append(time.perf_counter() - start)
                exports.append(learner.seconds)
        if learner.fell_back:
            raise RuntimeError("the publish fell back to a directory (the warning above says why)")
        return seconds, exports, before, await _difference(engine, pool.data)


@contextlib.asynccontextmanager
async def decoding(sampler: Sampler, count: int) -> AsyncIterator[None]:
    """Keeps so many requests under way; begins when all have had their first tokens."""
    from rljax.types import Request, SamplingParams

    def request(index: int, turn: int, tokens: int) -> Request:
        prompt = np.array([*PROMPT, 3 + index % 200, 3 + turn % 200], np.int32)
        return Request(f"{index}.{turn}", prompt, SamplingParams(tokens, min_new_tokens=tokens), seed=index)

    async def client(index: int) -> None:
        await sampler.generate(request(index, 0, 1))
        begun.append(index)
        if len(begun) == count:
            all_begun.set()
        turn = 0
        while True:
            turn += 1
            await sampler.generate(request(index, turn, LONG))

    begun: list[int] = []
    all_begun = asyncio.Event()
    clients = [asyncio.create_task(client(index)) for index in range(count)]
    waiting = asyncio.create_task(all_begun.wait())
    try:
        if clients:  # one that ends has failed
            working: set[asyncio.Task[Any]] = {waiting, *clients}
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        yield
        for task in clients:
            if task.done():
                task.result()
    finally:
        waiting.cancel()
        for task in clients:
            task.cancel()
        await asyncio.gather(waiting, *clients, return_exceptions=True)


class Timed:
    """A learner that measures the seconds of its exports."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self.seconds, self.kinds = learner, 0.0, set[type]()

    def export(self, target: ExportTarget) -> WeightSource:
        start = time.perf_counter()
        source = self._learner.export(target)
        self.seconds = time.perf_counter() - start
        self.kinds.add(type(target))
        return source

    @property
    def fell_back(self) -> bool:
        return len(self.kinds) > 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


async def _difference(engine: Engine, servers: int) -> float:
    """Returns the largest difference in nats between the servers' log-probs and the learner's."""
    from rljax.batching.packing import batch_of, pack
    from rljax.rollout.trajectories import trajectory_of
    from rljax.types import Request, SamplingParams

    prompt = np.array(PROMPT, np.int32)
    requests = [Request(f"check.{seed}", prompt, SamplingParams(NEW_TOKENS), seed=seed) for seed in range(2 * servers)]
    done = await asyncio.gather(*map(engine.sampler.generate, requests))  # at once, so that each server gets some
    versions = sorted({int(version) for completion in done for version in completion.versions})
    if versions != [engine.sampler.version]:
        raise RuntimeError(f"tokens of versions {versions}, not of {engine.sampler.version}")
    trajectories = [trajectory_of(prompt, completion, 0.0, {}) for completion in done]
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    batch = batch_of(trajectories, pack(lengths, max(lengths)))
    scored = await asyncio.to_thread(engine.learner.score, batch)
    return float(np.abs(scored - batch.behavior_logp)[batch.loss_mask].max())


def _config(mode: str, model_dir: Path, transport: str) -> Config:
    from rljax.config import io as config_io
    from rljax.configs import base

    config = base.get_config()
    on_cpu = DEVICE.value == "cpu"
    settings: dict[str, Any] = {
        "allocation_mode": mode.replace("|", "+") if on_cpu else mode,
        "actor.path": str(model_dir),
        "sglang.python": PYTHON.value,
        "sglang.device": "cpu" if on_cpu else "",
        "sglang.attention_backend": "torch_native" if on_cpu else "triton",
        "sglang.context_length": CONTEXT,
        "sglang.max_running_requests": max(16, DECODING.value),
        "sglang.transport": transport if transport != "memory" else "",
        "sglang.bucket_mb": BUCKET_MB.value,
        "sglang.extra_args": tuple(SERVER_ARGS.value),
        "jax.context_length": CONTEXT,
        "jax.slots": max(16, DECODING.value),
    }
    if not on_cpu:
        settings["sglang.mem_fraction_static"] = 0.3
    config.update_from_flattened_dict(settings)
    return config_io.from_dict(config)


if __name__ == "__main__":
    main.run_main(bench)
