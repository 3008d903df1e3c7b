"""A publish from the PyTorch learner to an SGLang server: seconds, by transport.

python -m experiments.bench.publish --sglang_python=PYTHON              # one GPU: directory, ipc
python -m experiments.bench.publish --sglang_python=PYTHON --learner_device=1  # two: and nccl
python -m experiments.bench.publish --sglang_python=PYTHON --device=cpu --sizes=tiny

Pause and resume are included. Models have random weights, in bfloat16. Each transport publishes
--repeats times after one that is not counted (it makes the group, and fills caches); the figure is
the median. "export" is the learner's part before the server pauses: all of the way into
memory-backed storage for a directory, nothing for the others. After the last, the server's version
and log-probs are looked at: they must be those of the weights that were sent.
"""

from __future__ import annotations

import asyncio
import json
import platform
import tempfile
import time
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
DEVICE = flags.DEFINE_enum("device", "cuda", ["cuda", "cpu"], "Device of server and learner.")
LEARNER_DEVICE = flags.DEFINE_integer("learner_device", 0, "GPU of the learner; the server's is 0.", lower_bound=0)
SIZES = flags.DEFINE_list("sizes", ["135m", "0.6b"], "Models: tiny, 135m (SmolLM2's shapes), 0.6b (Qwen3's).")
TRANSPORTS = flags.DEFINE_list("transports", [], "Some of directory, ipc, nccl, gloo; empty: all that are possible.")
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
}
PROMPT, NEW_TOKENS = (5, 6, 7, 8), 16


def bench() -> None:
    from rljax.errors import UserError

    unknown = set(SIZES.value) - set(SHAPES)
    if unknown:
        raise UserError(f"--sizes: no {unknown.pop()} ({', '.join(SHAPES)})")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in SIZES.value:
            try:
                rows += asyncio.run(_of_model(size, Path(scratch) / size))
            except Exception as error:  # a model that doesn't fit must not lose the others
                print(f"{size}: left out: {type(error).__name__}: {error}", flush=True)
    print(f"\n{where()}; medians of {REPEATS.value}")
    print(f"{'model':6s} {'transport':10s} {'MB':>8s} {'seconds':>8s} {'export':>8s} {'GB/s':>6s}  {'log-prob error':>14s}")
    for row in rows:
        print(
            f"{row['model']:6s} {row['transport']:10s} {row['bytes'] / 1e6:8.1f} {row['seconds']:8.3f} {row['export']:8.3f} "
            f"{row['bytes'] / row['seconds'] / 1e9:6.2f}  {row['error']:14.1e}"
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

    release = ".".join(map(str, installed_release(interpreter(SglangConfig.of(_config(Path(), "directory"))))))
    return f"{device}, torch {torch.__version__}, sglang {release}, bucket {BUCKET_MB.value} MB"


async def _of_model(size: str, directory: Path) -> list[dict[str, Any]]:
    """Starts a server of a model of this size and measures every transport to it in turn."""
    from rljax.config.schema import ModelConfig
    from rljax.engine import find_plugin
    from rljax.engines.cuda import transports
    from rljax.errors import UserError
    from rljax.hf import init_directory
    from rljax.hf.tokenizer import build_char_tokenizer

    shape = dict(SHAPES[size])
    vocabulary = shape.pop("vocab_size")
    model = ModelConfig(**shape, max_position_embeddings=2048, initializer_range=0.02, tokenizer="char")
    for seed, name in enumerate(("server", "learner")):  # other weights, so that a publish that does nothing is noticed
        init_directory(model, directory / name, seed=seed, vocab_size=vocabulary, eos_token_ids=[2], dtype="bfloat16")
        build_char_tokenizer(directory / name)
    config, pools = _config(directory / "server", ""), _pools()
    assert pools.sampler is not None
    started = time.perf_counter()
    sampler = await asyncio.to_thread(find_plugin("sglang").make_sampler, config, pools.sampler, directory / "server")
    print(f"{size}: server ready after {time.perf_counter() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    try:
        for transport in TRANSPORTS.value or transports.routes(config, pools):
            try:
                rows.append(
                    await _of_transport(transport, size, directory / "learner", sampler, version=1000 * (len(rows) + 1))
                )
                print(json.dumps(rows[-1]), flush=True)
            except (UserError, RuntimeError, OSError) as error:
                print(f"{size}, {transport}: left out: {type(error).__name__}: {error}", flush=True)
    finally:
        await sampler.close()
    return rows


async def _of_transport(transport: str, size: str, model_dir: Path, sampler: Sampler, version: int) -> dict[str, Any]:
    from rljax.engine import find_plugin

    config, pools = _config(model_dir, transport), _pools()
    assert pools.learner is not None
    timed = Timed(await asyncio.to_thread(find_plugin("fsdp").make_learner, config, pools.learner, model_dir))
    try:
        seconds, exports, error = await _published(timed, transport, sampler, version)
    finally:
        await asyncio.to_thread(timed.close)
    numbers = {"seconds": float(np.median(seconds[1:])), "least": min(seconds[1:]), "first": seconds[0]}
    sent = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return {
        "model": size,
        "transport": transport,
        "bytes": sent,
        "export": float(np.median(exports[1:])),
        "error": error,
    } | numbers


async def _published(learner: Timed, transport: str, sampler: Sampler, version: int) -> tuple[list[float], list[float], float]:
    """Returns seconds per publish and per export, and the log-prob error at the end.

    Raises RuntimeError if a publish fell back to a directory.
    """
    from rljax.engine import Engine, ExportToSampler

    pool = _pools().sampler
    assert pool is not None
    in_memory = None if transport == "directory" else ExportToSampler(transport, pool)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rljax-bench-") as publish_dir:
        engine = Engine(sampler, learner, in_memory, Path(publish_dir))
        seconds, exports = [], []
        for repeat in range(1 + REPEATS.value):
            start = time.perf_counter()
            await engine.publish(version + repeat)
            seconds.append(time.perf_counter() - start)
            exports.append(learner.seconds)
        if learner.fell_back:
            raise RuntimeError("the publish fell back to a directory (the warning above says why)")
        return seconds, exports, await _difference(engine)


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

    def close(self) -> None:
        self._learner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


async def _difference(engine: Engine) -> float:
    """Returns the largest difference in nats between the server's log-probs and the learner's."""
    from rljax.batching.packing import batch_of, pack
    from rljax.rollout.trajectories import trajectory_of
    from rljax.types import Request, SamplingParams

    request = Request("check", np.array(PROMPT, np.int32), SamplingParams(NEW_TOKENS), seed=1)
    done = await engine.sampler.generate(request)
    if set(done.versions.tolist()) != {engine.sampler.version}:
        raise RuntimeError(f"tokens of versions {sorted(set(done.versions.tolist()))}, not of {engine.sampler.version}")
    trajectory = trajectory_of(request.prompt_ids, done, 0.0, {})
    length = len(trajectory.token_ids)
    batch = batch_of([trajectory], pack([length], length))
    scored = await asyncio.to_thread(engine.learner.score, batch)
    return float(np.abs(scored - batch.behavior_logp)[batch.loss_mask].max())


def _pools() -> Allocation:
    from rljax.config.allocation import Allocation, Pool

    apart = LEARNER_DEVICE.value if DEVICE.value == "cuda" else 0
    return Allocation(Pool("sglang"), Pool("fsdp", first_device=apart))


def _config(model_dir: Path, transport: str) -> Config:
    from rljax.config import io as config_io
    from rljax.configs import base

    config = base.get_config()
    apart = DEVICE.value == "cpu" or LEARNER_DEVICE.value
    settings: dict[str, Any] = {
        "allocation_mode": "sglang:d1+fsdp:d1" if apart else "sglang:d1|fsdp:d1",
        "actor.path": str(model_dir),
        "sglang.python": PYTHON.value,
        "sglang.device": "cpu" if DEVICE.value == "cpu" else "",
        "sglang.attention_backend": "torch_native" if DEVICE.value == "cpu" else "triton",
        "sglang.context_length": 1024,
        "sglang.max_running_requests": 16,
        "sglang.transport": transport,
        "sglang.bucket_mb": BUCKET_MB.value,
        "sglang.extra_args": tuple(SERVER_ARGS.value),
    }
    if DEVICE.value == "cuda":
        settings["sglang.mem_fraction_static"] = 0.3
    config.update_from_flattened_dict(settings)
    return config_io.from_dict(config)


if __name__ == "__main__":
    main.run_main(bench)
