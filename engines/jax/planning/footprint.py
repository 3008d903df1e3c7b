"""Memory and speed of the JAX engine as arithmetic, for a plan: neither jax nor a device is needed.

Master weights and moments are float32, computed with in `actor.dtype`; each parameter is split as
backends/jax/parameters.py says. docs/plan.md has the terms, and how near they come to what was
measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rljax.backends.jax.parameters import Parameter, adapters, parameters
from rljax.backends.jax.platforms import lacking
from rljax.batching.compaction import bucket
from rljax.chips import GPU, TPU, Chip, Topology
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.row_lengths import padded
from rljax.engines.jax.usable_memory import usable
from rljax.errors import UserError
from rljax.hf.activations import checkpointing, logit_rows, training_bytes
from rljax.hf.spec import ModelSpec
from rljax.hf.splits import check_shards, check_tensor
from rljax.planning.footprint import Footprint, without_nothing
from rljax.planning.planner import Chosen, Job, LearnerPlan, SamplerPlan, every
from rljax.planning.program import Program
from rljax.planning.widths import SIZES, Widths, cache_bytes

UPDATES, DECODES = 0.40, 0.50  # measured on an H200 (docs/benchmarks.md): MFU; bandwidth of the whole of requests
REPEATED = 256  # tokens of the longest segment up to which a GPU's attention repeats key heads
TILE = 128  # elements of which the last dimension of an array on a TPU takes a multiple
PASSING = 4  # arrays of hidden states that lie between layers: the last ones, and gradients on their way
# Hidden size by FLOP/s. A slope that is part of the two products is made twice, which the TPU compiler avoids where they are
# short: at 1.1 and 1.25 (Qwen3-0.6B on v6e, SmolLM2 on v5p), not at 2.2 (1.7B on v6e) or with a vocabulary that is split.
SHORT = 1.7e-12
LENGTHS = 2  # padded row lengths between a power of two and the next


def elements(spec: ModelSpec, pool: Pool, which: Callable[[Parameter], bool] = lambda p: True) -> float:
    """Counts the elements of the parameters that `which` picks on a device of the pool."""
    return sum(math.prod(p.shape) / _parts(p, spec, pool) for p in parameters(spec) if which(p))


def _parts(parameter: Parameter, spec: ModelSpec, pool: Pool) -> int:
    """Returns into how many parts a parameter is split over the axes that divide it."""
    sizes, parts = {"fsdp": pool.fsdp, "tensor": pool.tensor}, 1
    whole = parameter.path[1] in ("k_proj", "v_proj") and spec.num_kv_heads % pool.tensor != 0
    for axis, dim in zip(parameter.axes, parameter.shape, strict=True):
        if axis is not None and not (axis == "tensor" and whole) and dim % sizes[axis] == 0:
            parts *= sizes[axis]
    return parts


def _is_matrix(parameter: Parameter) -> bool:
    return parameter.stacked and len(parameter.shape) > 2


class JaxPlanner:
    """Implements `rljax.planning.planner.Planner`."""

    def usable(self, chip: Chip) -> float:
        return usable(chip)

    def lends(self, config: Config) -> bool:
        return JaxConfig.of(config).release_memory

    def smaller(self, config: Config) -> Mapping[str, object]:
        settings = JaxConfig.of(config)
        room = settings.cache_tokens or settings.slots * settings.context_length
        found: dict[str, object] = {"jax.slots": settings.slots // 2} if settings.slots > 1 else {}
        if room // 2 >= settings.context_length:
            found["jax.cache_tokens"] = room // 2
        if not settings.release_memory:
            found["jax.release_memory"] = True  # where the run can do it
        return found | ({"jax.cache_dtype": "bfloat16"} if settings.cache_dtype != "bfloat16" else {})

    def fitting(self, config: Config, sampler: SamplerPlan, chip: Chip, spare: float) -> Mapping[str, object]:
        return {}

    def _known(self, chip: Chip) -> int | None:
        """Returns the bytes that JAX says it may use; None where it doesn't say, as on a CPU."""
        return None if chip.memory is None else int(self.usable(chip))

    def learner(self, job: Job) -> LearnerPlan:
        return _Learner(job, self._known(job.chip)).plan()

    def sampler(self, job: Job) -> SamplerPlan:
        return _sampler(job, self.usable(job.chip))

    def require_compiler(self, topology: Topology) -> None:
        from rljax.engines.jax.planning.compile_only import devices_of

        devices_of(topology)

    def programs(
        self, side: str, config: Config, pool: Pool, topology: Topology, model_dir: Path, chosen: Chosen = every
    ) -> Iterator[Program]:
        from rljax.engines.jax.planning.compile_only import programs

        return programs(side, config, pool, topology, model_dir, chosen)


class _Learner:
    """Learner of a job: counts that several terms need."""

    def __init__(self, job: Job, memory: int | None) -> None:
        config, spec, pool = job.config, job.spec, job.pool
        _check(spec, pool)
        _check_kernel("jax.attention", JaxConfig.of(config).attention, job.chip)
        self.job, self.config, self.spec, self.pool = job, config, spec, pool
        actor, self.size = config.actor, SIZES[config.actor.dtype]
        shards = pool.data * pool.fsdp
        length = padded(actor.mb_spec.max_tokens_per_row, LENGTHS)
        self.tokens = actor.mb_spec.rows_per_mb * length
        self.scored = actor.mb_spec.rows_per_mb * bucket(math.ceil(length * job.load.trained), length)
        self.several = job.load.several(config, actor.mb_spec.rows_per_mb * shards)
        self.chunk = logit_rows(actor.logprob_chunk, spec.vocab_size, memory)
        needed = training_bytes(spec, self.tokens, self.chunk, pool.fsdp * pool.tensor)
        self.remat = checkpointing(actor.gradient_checkpointing, needed, memory)
        chosen = JaxConfig.of(config).unroll
        self.unrolled = self.remat == "none" and job.chip.platform == GPU if chosen is None else chosen
        self.adapted = actor.lora.rank > 0
        self.vocabulary = _vocabulary(spec, pool)
        self.all = elements(spec, pool)
        self.trained = _adapter_elements(config, spec, pool) if self.adapted else self.all

    def plan(self) -> LearnerPlan:
        return LearnerPlan(Footprint(self._resident(), self._moments()), self.remat, UPDATES)

    def _resident(self) -> dict[str, float]:
        actor, bitwise = self.config.actor, JaxConfig.of(self.config).bitwise
        copy = 4 if bitwise else self.size  # a frozen base needs no master copy
        critic = 12 * self.trained if actor.adv_estimator == "gae" else 0.0
        teacher = 0.0 if self.job.teacher is None else self.size * elements(self.job.teacher, self.pool)
        return without_nothing(
            {
                "base weights": copy * self.all if self.adapted else 0.0,
                "master weights": 4 * self.trained,
                "Adam moments": 8 * self.trained,
                "reference": self.size * self.trained if actor.kl_ctl > 0 else 0.0,
                "critic": critic,
                "teacher": teacher,
            }
        )

    def _moments(self) -> dict[str, dict[str, float]]:
        whole = self.spec.vocab_size * self.spec.hidden_size / self.vocabulary
        matrices = elements(self.spec, self.pool, _is_matrix)
        copied = self.size * matrices if self.size < 4 and not self.adapted else 0.0
        unembedding = 0.0 if self.size == 4 and self.pool.fsdp == 1 else self.size * whole
        sums = 4 * self.trained if self.several else 0.0
        slope = 0.0 if self.adapted else 4 * whole
        common = {"activations": self._kept, "gradient sums": sums}
        layer = matrices * self.pool.fsdp / self.spec.num_layers  # gathered for use
        gathered = 2 * self.size * layer if self.pool.fsdp > 1 else 0.0
        working = self.size * (self._widths.everything + PASSING * self._widths.hidden) + self._normalizers
        working = 0.0 if self.unrolled else working * self.tokens
        gradients = 0.0 if self.adapted else self.size * matrices
        return {
            "loss": without_nothing(
                common
                | {
                    "weights in the dtype of computation": copied + unembedding,
                    "logits": self._logits,
                    "gradient of the unembedding": slope,
                    "hidden states that are scored": 2 * self.size * self.spec.hidden_size * self.scored,
                }
            ),
            "backward pass": without_nothing(
                common
                | {  # the unembedding is done with
                    "activations": 0.0 if self.unrolled else self._kept,
                    "weights in the dtype of computation": copied,
                    "a layer's activations": working,
                    "a layer's weights": gathered,
                    "gradients": gradients + 4 * (self.trained if self.unrolled or self.adapted else 0.0),
                    "gradient of the unembedding": slope,
                }
            ),
            "publishing": {"copy for the sampler": SIZES[JaxConfig.of(self.config).sampler_dtype] * self.all},
            "optimizer step": without_nothing(
                {"gradients": 4 * self.trained, "gradients in the dtype of computation": gradients if self.size < 4 else 0.0}
            ),
        }

    @property
    def _widths(self) -> Widths:
        return Widths.of(self.spec, self.pool.tensor, TILE if self.job.chip.platform == TPU else 1)

    @property
    def _kept(self) -> float:
        """Bytes of the activations that the backward pass finds."""
        widths = self._widths
        if self.remat == "full":
            elements = widths.hidden
        elif self.remat == "dots":
            elements = widths.hidden + widths.products
        elif self.unrolled:  # XLA finds that what it would compute again is there
            elements = widths.everything + self._repeated
        else:  # a loop keeps what products and attention put out, but for the last product, which the next layer takes in
            elements = widths.products + widths.attended
            return (self.size * elements + self._normalizers) * self.spec.num_layers * self.tokens
        return self.size * elements * self.spec.num_layers * self.tokens

    @property
    def _normalizers(self) -> float:
        """Bytes of a token's log-sum-exps, of which splash attention fills the lanes of a TPU."""
        return 4 * TILE * self.spec.num_heads / self.pool.tensor if self.job.chip.platform == TPU else 0.0

    @property
    def _repeated(self) -> float:
        """Elements by which keys and values grow when they are repeated for their query heads."""
        gconfig, widths = self.config.gconfig, self._widths
        longest = self.job.load.prompt + gconfig.max_new_tokens
        repeats = self.size == 2 and self.job.chip.platform == GPU and longest <= REPEATED
        return 2 * (widths.queries - widths.keys) if repeats else 0.0

    @property
    def _logits(self) -> float:
        chunks = max(math.ceil(self.scored / self.chunk), 1)
        rows = math.ceil(self.scored / chunks)
        return (4 + self._slope(chunks)) * rows * self.spec.vocab_size / self.vocabulary

    def _slope(self, chunks: int) -> int:
        """Bytes of a logit's slope beside the logit: none where it takes its place, or is never in
        memory, as part of the products that take it.
        """
        chip = self.job.chip
        short = self.spec.hidden_size / chip.flops < SHORT and self.vocabulary == 1
        fused = chunks > 1 and chip.platform == TPU and not short
        return 0 if self.size == 4 or fused else self.size


def _adapter_elements(config: Config, spec: ModelSpec, pool: Pool) -> float:
    lora = config.actor.lora
    return sum(math.prod(p.shape) / _parts(p, spec, pool) for p in adapters(spec, lora.rank, lora.target_modules))


def _sampler(job: Job, memory: float) -> SamplerPlan:
    spec, pool, settings = job.spec, job.pool, JaxConfig.of(job.config)
    _check(spec, pool)
    _check_kernel("jax.decode_attention", settings.decode_attention, job.chip)
    shards = pool.data * pool.fsdp
    size = SIZES["float32" if settings.bitwise else settings.sampler_dtype]
    matrices = elements(spec, pool, lambda p: p.path[-1] != "scale")
    weights = size * matrices + 4 * (elements(spec, pool) - matrices)  # norms stay float32
    settings.check_slots(shards)
    slots = settings.slots // shards
    token = cache_bytes(spec, settings.cache_dtype, pool.tensor)
    page = settings.page_size
    columns = math.ceil(settings.context_length / page)
    if settings.cache_tokens is not None:
        pages = settings.cache_tokens // (page * shards)
        if pages < columns:
            raise UserError(f"jax.cache_tokens: {settings.cache_tokens} tokens are less than one request in each data shard")
    else:
        free = settings.cache_memory_fraction * max(memory - job.beside - weights, 0.0)
        pages = slots * columns if math.isinf(free) else min(slots * columns, int(free / (page * token)))
        pages = max(pages, columns)  # with less than one request's, a run would not start
    widths = Widths.of(spec, pool.tensor)
    prefill = size * settings.prefill_chunk * (widths.everything + widths.hidden)
    footprint = Footprint(
        {"sampler's weights": weights, "KV cache": pages * page * token},
        {
            "decoding": _copied(job, size, widths) | {"sampler's logits": 8.0 * slots * spec.vocab_size},
            "prefill": {"a prefill's activations": prefill},
            "publishing": {"weights on their way": weights},
        },
    )
    return SamplerPlan(footprint, shards, slots, float(pages * page), weights, token, DECODES)


def _copied(job: Job, size: int, widths: Widths) -> dict[str, float]:
    """Returns the bytes of the weights that decoding has once more, by component.

    Before its loop over tokens XLA joins matrices that have their input in common, those of all
    layers. What FSDP splits it gathers in the loop, as whole matrices are larger than their parts
    and it moves nothing out of a loop that grows: on a TPU the unembedding, with the next layer's
    two largest matrices on their way; on a GPU, where it unrolls a loop with collectives and begins
    them early, up to all weights of two turns.
    """
    spec, pool = job.spec, job.pool
    if pool.fsdp == 1:
        joined = widths.queries + 2 * widths.keys + 2 * widths.mlp
        return {"joined matrices": size * spec.num_layers * spec.hidden_size * joined}
    if job.chip.platform == GPU:
        return {"weights gathered for use": 2 * size * elements(spec, dataclasses.replace(pool, fsdp=1))}
    gathered = spec.vocab_size / _vocabulary(spec, pool) + 2 * widths.mlp
    return {"weights gathered for use": size * spec.hidden_size * gathered}


def _vocabulary(spec: ModelSpec, pool: Pool) -> int:
    """Returns over how many devices of a tensor-parallel group the vocabulary is split."""
    return pool.tensor if spec.vocab_size % pool.tensor == 0 else 1


def _check(spec: ModelSpec, pool: Pool) -> None:
    """Raises UserError where an axis does not divide what it must, as sharding the model would."""
    check_tensor(spec, pool.tensor, key_heads=False)
    check_shards(spec, pool.fsdp)


def _check_kernel(key: str, kernel: str, chip: Chip) -> None:
    """Raises UserError for a kernel that is not made for the chip, as choosing it would."""
    reason = lacking(kernel, chip.platform)
    if reason is not None and chip.platform in (GPU, TPU):
        raise UserError(f"{key}: {kernel} can't be used on {chip.name}: {reason} (auto, or xla)")
