"""Memory and speed of the CUDA path as arithmetic, for a plan: neither torch nor SGLang is needed.

docs/plan.md has the terms, and how near they come to what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from rljax.batching.compaction import bucket
from rljax.chips import GIB, GPU, TPU, Chip, Topology
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engines.http.config import SglangConfig
from rljax.errors import UserError
from rljax.hf.activations import checkpointing, logit_rows
from rljax.hf.splits import check_copied_heads, check_tensor
from rljax.hf.tensors import EMBEDDING, UNEMBEDDING, parameter_count, projections, tensors
from rljax.planning.footprint import Footprint, without_nothing
from rljax.planning.planner import Chosen, Job, LearnerPlan, SamplerPlan, every
from rljax.planning.program import Program
from rljax.planning.widths import SIZES, Widths, cache_bytes

CONTEXT = GIB // 2  # bytes of a GPU that a process of torch takes for itself
STATIC = 0.85  # share of the memory that SGLang gives weights and cache, about, where it chooses
GRAPHS = 2 * GIB  # bytes of SGLang's CUDA graphs and activations, about
REQUESTS = 2048  # of a server at once, about, where SGLang chooses
UPDATES, DECODES = 0.27, 0.45  # measured on an H200 (docs/benchmarks.md): MFU; bandwidth of the whole of requests
ROOM = 2  # bytes of a logit in half precision beside float32 and its slope


def _usable(chip: Chip) -> float:
    if chip.platform == TPU:
        raise UserError(f"--topology: {chip.name} is a TPU, and fsdp and sglang run on GPUs (allocation_mode with jax)")
    return math.inf if chip.memory is None else chip.memory - CONTEXT


class FsdpPlanner:
    """Implements `rljax.planning.planner.Planner` for the PyTorch learner."""

    def usable(self, chip: Chip) -> float:
        return _usable(chip)

    def lends(self, config: Config) -> bool:
        return False

    def smaller(self, config: Config) -> Mapping[str, object]:
        return {}

    def sampler(self, job: Job) -> SamplerPlan:
        raise UserError("allocation_mode: fsdp cannot sample (put a sampler before it)")

    def learner(self, job: Job) -> LearnerPlan:
        return _Learner(job).plan()

    def require_compiler(self, topology: Topology) -> None:
        if topology.chip.platform != GPU:
            raise UserError(f"--compile: {topology.name} has no GPUs, and fsdp runs on those")
        if find_spec("torch") is None:
            raise UserError("--compile: fsdp needs torch, also its CPU build (pip install 'rljax[torch]')")

    def programs(
        self, side: str, config: Config, pool: Pool, topology: Topology, model_dir: Path, chosen: Chosen = every
    ) -> Iterator[Program]:
        from rljax.engines.cuda.without_data import programs

        self.require_compiler(topology)
        return programs(config, pool, model_dir, chosen)


class _Learner:
    """Learner of a job: counts that several terms need."""

    def __init__(self, job: Job) -> None:
        config, spec, pool = job.config, job.spec, job.pool
        check_tensor(spec, pool.tensor, key_heads=True)
        self.job, self.config, self.spec, self.pool = job, config, spec, pool
        actor, self.size = config.actor, SIZES[config.actor.dtype]
        self.shards = pool.fsdp * pool.context
        length = actor.mb_spec.max_tokens_per_row
        self.tokens = actor.mb_spec.rows_per_mb * length / pool.context
        self.scored = actor.mb_spec.rows_per_mb * bucket(math.ceil(length * job.load.trained), length) / pool.context
        self.several = job.load.several(config, pool.data * pool.fsdp)
        self.chunk = logit_rows(actor.logprob_chunk, spec.vocab_size)
        self.remat = checkpointing(actor.gradient_checkpointing, 0, None)
        self.adapted = actor.lora.rank > 0
        table = spec.vocab_size * spec.hidden_size
        self.tables = table * sum(name in tensors(spec) for name in (EMBEDDING, UNEMBEDDING)) / self._vocabulary
        self.layers = (parameter_count(spec) - self.tables * self._vocabulary) / pool.tensor
        self.all = self.tables + self.layers  # of a tensor-parallel rank, not split over f and c yet
        self.trained = (_adapter_elements(config, job) if self.adapted else self.all) / self.shards

    def plan(self) -> LearnerPlan:
        return LearnerPlan(Footprint(self._resident(), self._moments()), self.remat, UPDATES)

    def _resident(self) -> dict[str, float]:
        actor = self.config.actor
        teacher = self.job.teacher
        teaching = 0.0 if teacher is None else self.size * parameter_count(teacher) / self.pool.tensor / self.shards
        return without_nothing(
            {
                "base weights": self.size * self.all / self.shards if self.adapted else 0.0,
                "master weights": 4 * self.trained,
                "Adam moments": 8 * self.trained,
                "reference": self.size * self.trained if actor.kl_ctl > 0 else 0.0,
                "critic": 12 * self.trained if actor.adv_estimator == "gae" else 0.0,
                "teacher": teaching,
            }
        )

    def _moments(self) -> dict[str, dict[str, float]]:
        gathered = self.size * self.tables  # the root stays gathered
        layer = 2 * self.size * self.layers / self.spec.num_layers  # the one at work, and the one after it
        table = self.spec.vocab_size * self.spec.hidden_size / self._vocabulary
        slope = 0.0 if self.adapted else self.size * table
        reduced = 0.0 if self.adapted else 4 * self.tables * (1 + 1 / self.shards)
        one = {"a layer's weights": layer, "embedding and unembedding": gathered}
        working = 2 * self.size * self._everything * self.tokens if self.remat != "none" else 0.0
        sums = 4 * self.trained if self.several else 0.0  # of the micro-batches before
        layers = 4 * self.trained if self.several or self.adapted else 4 * self.layers / self.shards
        found = {
            "loss": one
            | {
                "activations": self._kept,
                "gradients": sums,
                "logits": self._logits,
                "gradient of the unembedding": slope,
                "hidden states that are scored": 2 * self.size * self.spec.hidden_size * self.scored,
            },
            "last layer's backward pass": one
            | {
                "activations": self._kept,
                "a layer's activations": working,
                "gradients": sums,
                "gradient of the unembedding": slope,
            },
            "first layer's backward pass": one
            | {"a layer's activations": working, "gradients": layers, "gradient of the unembedding": slope},
            "reduction of the embedding's gradient": one
            | {"gradients": layers, "gradient of the unembedding": slope, "buffers of the reduction": reduced},
            "optimizer step": {"gradients": 4 * self.trained},
        }
        if self.config.actor.kl_ctl > 0:
            found["scoring the reference"] = one | {"copy of the weights": 4 * self.trained, "logits": self._logits}
        publish_bucket = float(SglangConfig.of(self.config).bucket_mb << 20)
        found["publishing"] = {"publish bucket": publish_bucket, "a gathered tensor": self.size * table}
        return {name: without_nothing(components) for name, components in found.items()}

    @property
    def _vocabulary(self) -> int:
        return self.pool.tensor if self.spec.vocab_size % self.pool.tensor == 0 else 1

    @property
    def _everything(self) -> float:
        widths = Widths.of(self.spec, self.pool.tensor)
        return widths.everything + 2 * widths.hidden  # of the residual sums both parts are kept

    @property
    def _kept(self) -> float:
        """Bytes of the activations that the backward pass finds."""
        widths = Widths.of(self.spec, self.pool.tensor)
        elements = {
            "none": self._everything,
            "full": widths.hidden,
            "dots": widths.hidden + widths.products,
        }[self.remat]
        return self.size * elements * self.spec.num_layers * self.tokens

    @property
    def _logits(self) -> float:
        rows = min(self.chunk, max(self.scored, 1))
        return (4 + self.size + (ROOM if self.size < 4 else 0)) * rows * self.spec.vocab_size / self._vocabulary


def _adapter_elements(config: Config, job: Job) -> float:
    """Counts the elements of the adapters; a tensor-parallel rank has a part of one factor only."""
    lora, total = config.actor.lora, 0.0
    for name, (outputs, inputs, _) in projections(job.spec).items():
        short = name.split(".")[-1]
        if short in lora.target_modules:
            split, whole = (inputs, outputs) if short in ("o_proj", "down_proj") else (outputs, inputs)
            total += lora.rank * (split / job.pool.tensor + whole)
    return total * job.spec.num_layers


class SglangPlanner:
    """Implements `rljax.planning.planner.Planner` for SGLang servers."""

    def usable(self, chip: Chip) -> float:
        return _usable(chip)

    def lends(self, config: Config) -> bool:
        return SglangConfig.of(config).release_memory

    def smaller(self, config: Config) -> Mapping[str, object]:
        settings = SglangConfig.of(config)
        found: dict[str, object] = {"sglang.mem_fraction_static": round((settings.mem_fraction_static or STATIC) / 2, 3)}
        return found if settings.release_memory else found | {"sglang.release_memory": True}  # where the run can do it

    def learner(self, job: Job) -> LearnerPlan:
        raise UserError("allocation_mode: sglang cannot learn (put a learner after it)")

    def sampler(self, job: Job) -> SamplerPlan:
        """Estimates a server: it takes its share of the memory, whatever the requests need."""
        settings, spec, pool = SglangConfig.of(job.config), job.spec, job.pool
        check_tensor(spec, pool.tensor, key_heads=False)
        check_copied_heads(spec, pool.tensor)
        dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
        weights = SIZES[dtype] * parameter_count(spec) / pool.tensor  # those that can't be split are small
        static = (settings.mem_fraction_static or STATIC) * (job.chip.memory or 0)
        token = cache_bytes(spec, dtype, pool.tensor)
        cache = max(static - weights, 0.0)
        footprint = Footprint(
            {"sampler's weights": weights, "KV cache": cache, "graphs and workspace": float(GRAPHS)},
            {"decoding": {}, "publishing": {"sampler's publish bucket": float(settings.bucket_mb << 20)}},
        )
        requests = settings.max_running_requests or REQUESTS
        problem = _too_small(job, weights, token)
        return SamplerPlan(footprint, pool.data, requests, cache / token, weights, token, DECODES, problem)

    def require_compiler(self, topology: Topology) -> None:
        """Needs nothing: there are no programs."""

    def programs(
        self, side: str, config: Config, pool: Pool, topology: Topology, model_dir: Path, chosen: Chosen = every
    ) -> Iterator[Program]:
        return iter(())  # SGLang's are known to SGLang


def _too_small(job: Job, weights: float, token: float) -> str:
    """Says that a server's share of the memory lacks room for the weights and one request, which is
    then no start, however much memory is left; "" if it has it.

    Args:
      weights: bytes per device.
      token: bytes per device of a token's keys and values.
    """
    settings, memory = SglangConfig.of(job.config), job.chip.memory
    chosen = settings.mem_fraction_static or STATIC
    longest = job.load.prompt + job.config.gconfig.max_new_tokens
    longest = min(longest, settings.context_length or longest)
    needed = weights + longest * token
    if memory is None or needed <= chosen * memory:
        return ""
    share = math.ceil(100 * needed / memory) / 100
    remedy = f"{share:.2f} or more, or a larger t" if share * memory + GRAPHS <= _usable(job.chip) else "a larger t"
    return (
        f"sglang.mem_fraction_static={chosen:g} is {chosen * memory / GIB:.2f} GiB, and weights and a request of"
        f" {longest} tokens take {needed / GIB:.2f} ({remedy})"
    )
