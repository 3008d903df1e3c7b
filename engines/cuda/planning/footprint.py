"""Memory and speed of the CUDA path as arithmetic, for a plan: neither torch nor SGLang is needed.

docs/plan.md has the terms, and how near they come to what was measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from rljax.batching.compaction import bucket
from rljax.chips import CPU, GIB, GPU, TPU, Chip, Topology
from rljax.config.allocation import Pool
from rljax.config.schema import Config
from rljax.engines.cuda.config import WORKSPACE_BYTES
from rljax.engines.http.config import SglangConfig
from rljax.errors import UserError
from rljax.hf.activations import checkpointing, logit_rows
from rljax.hf.splits import check_copied_heads, check_tensor
from rljax.hf.tensors import EMBEDDING, UNEMBEDDING, parameter_count, projections, tensors
from rljax.objective.spec import Objective
from rljax.planning.footprint import Footprint, without_nothing
from rljax.planning.load import Load
from rljax.planning.planner import Chosen, Job, LearnerPlan, SamplerPlan, every
from rljax.planning.program import Program
from rljax.planning.widths import SIZES, Widths, cache_bytes

CONTEXT = GIB // 2  # bytes of a GPU that a process of torch takes for itself
STATIC = 0.85  # share of the memory that SGLang gives weights and cache, about, where it chooses
GRAPHS = 2 * GIB  # bytes of SGLang's CUDA graphs and activations, about
REQUESTS = 2048  # of a server at once, about, where SGLang chooses
UPDATES, DECODES = 0.27, 0.45  # measured on an H200 (docs/benchmarks.md): MFU; bandwidth of the whole of requests
INDEX = 8  # bytes of where a scored hidden state is, for each of its elements


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

    def fitting(self, config: Config, sampler: SamplerPlan, chip: Chip, spare: float) -> Mapping[str, object]:
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
        from rljax.engines.cuda.planning.without_data import programs

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
        self.cut = Cut.of(config, pool, job.load)
        self.several = job.load.several(config, self.cut.rows * pool.data * pool.fsdp)
        self.remat = checkpointing(actor.gradient_checkpointing, 0, None)
        self.adapted = actor.lora.rank > 0
        self.table = spec.vocab_size * spec.hidden_size / self._vocabulary
        self.tables = self.table * sum(name in tensors(spec) for name in (EMBEDDING, UNEMBEDDING))
        self.layers = (parameter_count(spec) - self.tables * self._vocabulary) / pool.tensor
        self.all = self.tables + self.layers  # of a tensor-parallel rank, not split over f and c yet
        self.trained = (_adapter_elements(config, job) if self.adapted else self.all) / self.shards

    def plan(self) -> LearnerPlan:
        return LearnerPlan(Footprint(self._resident(), self._moments()), self.remat, UPDATES, self._note)

    @property
    def _note(self) -> str:
        rows, ranks = self.cut.rows, self.pool.context
        if rows == self.config.actor.mb_spec.rows_per_mb:
            return ""
        return f"a micro-batch has {rows} rows, as each of the {ranks} ranks that share rows (c) scores whole ones"

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
                "workspaces of matrix products": 0.0 if self.job.chip.platform == CPU else float(WORKSPACE_BYTES),
            }
        )

    def _moments(self) -> dict[str, dict[str, float]]:
        found = self._update()
        if self.config.actor.kl_ctl > 0:
            scoring = {"copy of the weights": 4 * self.trained, "logits": self._logits}
            found["scoring the reference"] = self._gathered(1) | scoring
        publish_bucket = float(SglangConfig.of(self.config).bucket_mb << 20)
        found["publishing"] = {"publish bucket": publish_bucket, "a gathered tensor": self.size * self.table}
        return {name: without_nothing(components) for name, components in found.items()}

    def _update(self) -> dict[str, dict[str, float]]:
        """Returns the moments of an update: of its last micro-batch, and of the optimizer."""
        sums = 4 * self.trained if self.several else 0.0  # of the micro-batches before
        layers = 4 * self.trained if self.several or self.adapted else 4 * self.layers / self.shards
        slope = {"gradient of the unembedding": 0.0 if self.adapted else self.size * self.table}
        joined = 0.0 if self.adapted else 4 * self.layers / self.spec.num_layers  # of the layer before
        kept = {"activations": self._kept, "gradients": sums, "last norm": self._last_norm}
        states = self.size * self.spec.hidden_size * self.cut.whole if self.pool.context > 1 else 0.0
        found = {
            "loss": self._gathered(self.shards > 1) | kept | self._loss() | {"hidden states of whole rows": states},
            "hidden states of whole rows": self._gathered(1) | kept | slope | {"hidden states of whole rows": 2 * states},
            "last layer's backward pass": self._gathered(2)
            | slope
            | {"activations": self._kept, "a layer's activations": self._working, "gradients": sums},
            "first layer's backward pass": self._gathered(2)
            | slope
            | {"a layer's activations": self._working, "gradients": layers, "buffers of the reduction": joined},
            "reduction of the embedding's gradient": {"gradients": layers, "buffers of the reduction": self._reduced},
            "optimizer step": {"gradients": 4 * self.trained},
        }
        if self.pool.context == 1:
            del found["hidden states of whole rows"]
        return found

    def _gathered(self, layers: int) -> dict[str, float]:
        """Returns what FSDP2 has gathered: both tables, for the whole step, and some layers."""
        layer = self.size * self.layers / self.spec.num_layers
        return {"a layer's weights": layers * layer, "embedding and unembedding": self.size * self.tables}

    def _loss(self) -> dict[str, float]:
        """Returns what the unembedding takes: where a token's loss depends on that token alone,
        together with the objective, in the forward pass; else in the backward pass.
        """
        slope, gradient = (
            (4, self.size) if self._by_token else (self.size, 4)
        )  # bytes of those of unembedding and hidden states
        hidden = (self.size + gradient + INDEX) * self.spec.hidden_size * self.cut.scored
        return {
            "logits": self._logits,
            "gradient of the unembedding": slope * self.table,
            "hidden states that are scored": hidden,
        }

    @property
    def _vocabulary(self) -> int:
        return self.pool.tensor if self.spec.vocab_size % self.pool.tensor == 0 else 1

    @property
    def _by_token(self) -> bool:
        return Objective.from_config(self.config).by_token

    @property
    def _reduced(self) -> float:
        """Bytes of the tables' gradients on their way: joined in float32, beside what they are
        joined of, and then beside this rank's part of the sum.
        """
        part = 8.0 if self.shards == 1 else 4 / self.shards  # of one rank a copy beside it
        return 0.0 if self.adapted else self.tables * (4 + max(self.size, part))

    @property
    def _last_norm(self) -> float:
        """Bytes that the norm behind the layers keeps: float32, what it weighs, and what comes out."""
        return (4 + 2 * self.size) * self.spec.hidden_size * self.cut.tokens

    @property
    def _widths(self) -> Widths:
        return Widths.of(self.spec, self.pool.tensor)

    @property
    def _everything(self) -> float:
        """Bytes that a layer keeps: keys and values as attention reads them are repeated for their
        query heads, of all tokens that this rank's queries see.
        """
        widths, seen = self._widths, self._widths.attended if self.size < 4 else self._widths.seen
        return self.size * ((widths.everything - 2 * widths.seen) * self.cut.tokens + 2 * seen * self.cut.keys)

    @property
    def _working(self) -> float:
        """Bytes that a layer's backward pass takes beside what is kept: with recomputation what the
        layer keeps, or the attention over whole rows if that takes more.
        """
        hidden = self.size * self._widths.hidden * self.cut.tokens
        if self.remat == "none":
            return self._attention_over_rows
        products = self._everything + 3 * hidden  # what two products put out, and the gradient from above
        return max(products, hidden + self._attention_over_rows)

    @property
    def _attention_over_rows(self) -> float:
        """Bytes of keys and values of whole rows, with context parallelism."""
        if self.pool.context == 1:
            return 0.0
        widths = self._widths
        read = widths.attended if self.size < 4 else widths.seen
        whole = self.size * (2 * widths.seen + 3 * read) * self.cut.whole  # gathered, repeated, in the order of rows
        own = self.size * (widths.hidden + widths.queries + 2 * widths.keys + widths.attended + widths.seen) * self.cut.tokens
        return whole + own + 2 * self.size * read * self.cut.keys

    @property
    def _kept(self) -> float:
        """Bytes of the activations that the backward pass finds."""
        if self.remat == "none":
            return self._everything * self.spec.num_layers
        widths = self._widths
        elements = widths.hidden + (widths.products if self.remat == "dots" else 0.0)
        return self.size * elements * self.spec.num_layers * self.cut.tokens

    @property
    def _logits(self) -> float:
        """Bytes of a chunk's logits and slopes, or of its part of the unembedding's gradient if
        that is more.
        """
        chunk, scored = logit_rows(self.config.actor.logprob_chunk, self.spec.vocab_size), max(self.cut.scored, 1)
        rows, after = min(chunk, scored), max(min(chunk, scored - chunk), 0)  # of a chunk, and of the one after it
        slopes = max(
            (4 + self.size) * rows, (4 + self.size) * after + self.size * rows
        )  # the last chunk's are there till the next
        if not self._by_token and after:
            slopes = (4 + 4 + self.size) * rows  # and the last block's logits; blocks are of columns, and equal
        product = self.size * rows + 4 * self.spec.hidden_size if self._by_token and self.size < 4 else 0.0
        return max(slopes, product) * self.spec.vocab_size / self._vocabulary


@dataclasses.dataclass(frozen=True)
class Cut:
    """A micro-batch on one rank, as `rljax.engines.cuda.learning.rows` cuts it."""

    rows: int  # of the micro-batch; of a context group, which has whole numbers of them for each rank to score
    tokens: float  # that go through this rank's layers
    whole: float  # tokens of the rows, of all ranks of the group
    keys: float  # tokens that this rank's queries see, at most
    scored: float  # by this rank

    @classmethod
    def of(cls, config: Config, pool: Pool, load: Load) -> Cut:
        ranks, spec = pool.context, config.actor.mb_spec
        rows = math.ceil(spec.rows_per_mb / ranks) * ranks
        length = spec.max_tokens_per_row
        keys = min(
            length, length / ranks + (load.tokens if ranks > 1 else 0)
        )  # of an episode that began before this rank's slice
        scored = rows / ranks * bucket(math.ceil(length * load.trained), length)
        return cls(rows, rows * length / ranks, rows * length, rows * keys, scored)


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

    def fitting(self, config: Config, sampler: SamplerPlan, chip: Chip, spare: float) -> Mapping[str, object]:
        """Returns the least share of the memory with which the server starts, or the largest with
        which it fits: what is left of its share is the cache, so shares add up as bytes do.
        """
        share = SglangConfig.of(config).mem_fraction_static or STATIC
        if chip.memory is None:
            return {}
        value = _least_share(sampler.needed, chip) if sampler.problem else math.floor(100 * (share + spare / chip.memory)) / 100
        return {"sglang.mem_fraction_static": value} if 0 < value < 1 and value != share else {}

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
            without_nothing({"sampler's weights": weights, "KV cache": cache, "graphs and workspace": float(GRAPHS)}),
            {"decoding": {}, "publishing": {"sampler's publish bucket": float(settings.bucket_mb << 20)}},
        )
        requests = settings.max_running_requests or REQUESTS
        needed = weights + _longest(job) * token
        problem = _too_small(job, needed)
        return SamplerPlan(footprint, pool.data, requests, cache / token, weights, token, DECODES, problem, needed)

    def require_compiler(self, topology: Topology) -> None:
        """Needs nothing: there are no programs."""

    def programs(
        self, side: str, config: Config, pool: Pool, topology: Topology, model_dir: Path, chosen: Chosen = every
    ) -> Iterator[Program]:
        return iter(())  # SGLang's are known to SGLang


def _longest(job: Job) -> int:
    """Returns the tokens of the longest request that a server has to have room for."""
    longest = job.load.prompt + job.config.gconfig.max_new_tokens
    return min(longest, SglangConfig.of(job.config).context_length or longest)


def _least_share(needed: float, chip: Chip) -> float:
    """Returns the least share of a chip's memory, in hundredths, that holds so many bytes."""
    return math.ceil(100 * needed / chip.memory) / 100 if chip.memory else 0.0


def _too_small(job: Job, needed: float) -> str:
    """Says that a server's share of the memory lacks room for the weights and one request, which is
    then no start, however much memory is left; "" if it has it.

    Args:
      needed: bytes per device of these.
    """
    memory, chosen = job.chip.memory, SglangConfig.of(job.config).mem_fraction_static or STATIC
    if memory is None or needed <= chosen * memory:
        return ""
    share = _least_share(needed, job.chip)
    remedy = f"{share:.2f} or more, or a larger t" if share * memory + GRAPHS <= _usable(job.chip) else "a larger t"
    return (
        f"sglang.mem_fraction_static={chosen:g} is {chosen * memory / GIB:.2f} GiB, and weights and a request of"
        f" {_longest(job)} tokens take {needed / GIB:.2f} ({remedy})"
    )
