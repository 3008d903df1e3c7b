"""Estimates add up, scale as the shards do, agree with the arrays that a run makes, and with what was measured."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pallas_tpu

from rljax.backends.jax.parameters import parameters
from rljax.backends.jax.platforms import PLATFORMS
from rljax.backends.jax.sharding import AXES, parameter_sharding, single_device_mesh
from rljax.backends.torch.context_parallel import Context
from rljax.batching.compaction import compact, kept
from rljax.batching.full import full_batch
from rljax.chips import CHIPS, GIB, Topology, chip_of
from rljax.config import checks, io
from rljax.config.allocation import Pool
from rljax.engine import find_plugin
from rljax.engines.cuda.learning.rows import micro_batches
from rljax.engines.cuda.planning.footprint import Cut
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.learning.policy import Policy
from rljax.engines.jax.sampling.cache_size import shard_bytes
from rljax.engines.jax.sampling.programs import Programs
from rljax.errors import UserError
from rljax.experiments.bench.plan_cases import learners, samplers
from rljax.experiments.bench.several.planned import learner_gb
from rljax.hf.companion_files import write_companions
from rljax.hf.shapes import SHAPES, shape_of
from rljax.hf.tensors import parameter_count, projections
from rljax.launching.hosts import host_of
from rljax.metrics.mean import Mean
from rljax.planning.balance import balanced
from rljax.planning.changes import changed, changes, largest_rows, longest_row
from rljax.planning.estimate import Request, plan
from rljax.planning.footprint import Footprint, in_turn, together
from rljax.planning.load import Load
from rljax.planning.model_shape import shape_in
from rljax.planning.run import estimate_of
from rljax.planning.text import Report
from rljax.sinks.planned import PlanSink
from rljax.sinks.run_directory import RunDirectory

REPOSITORY = Path(__file__).resolve().parents[3]

WORKSPACES = "workspaces of matrix products"
ONE_EPISODE = {"train_dataset.batch_size": 1, "gconfig.n_samples": 1}  # so that a minibatch is one micro-batch
LEARNER_ALONE = {"rollout.addr": "host:1"}


def request_of(mode, shape="qwen3-0.6b", topology="h100:8", prompt=512, completion=512, find=find_plugin, **keys):
    pairs = [(name, json.dumps(value) if isinstance(value, bool) else str(value)) for name, value in keys.items()]
    config = io.load("base", [("actor.path", shape), ("train_dataset.path", "task:add"), ("allocation_mode", mode), *pairs])
    return Request(config, shape_of(shape), Topology.parse(topology), find, prompt, completion)


def plan_of(mode, **rest):
    return plan(request_of(mode, **rest))


def learner_of(mode, **rest):
    made = plan_of(mode, **{**rest, **LEARNER_ALONE}).learner
    return made.footprint


@pytest.mark.parametrize("mode", ["jax:d1", "sglang:d4+fsdp:f4", "sglang:d2|fsdp:f2", "jax:d2t2+jax:f4", "jax:d1+fsdp:d1"])
def test_components_add_up_to_the_peak_and_no_moment_is_above_it(mode):
    for group in plan_of(mode).groups:
        footprint = group.footprint
        assert sum(footprint.components.values()) == pytest.approx(footprint.peak)
        assert all(size > 0 for size in footprint.components.values())
        assert footprint.peak == pytest.approx(max(footprint.held + sum(m.values()) for m in footprint.moments.values()))
        assert group.margin == pytest.approx(group.usable - footprint.peak)


@pytest.mark.parametrize("shape", ["qwen3-8b", "smollm2-135m", "qwen2.5-0.5b"])
@pytest.mark.parametrize("engine", ["jax", "fsdp"])
def test_what_is_trained_takes_twelve_bytes_per_parameter_between_steps(engine, shape):
    resident = learner_of(f"{engine}:d1", shape=shape).resident
    held = sum(size for name, size in resident.items() if name != WORKSPACES)
    assert held == pytest.approx(12 * parameter_count(shape_of(shape)), rel=1e-9)


@pytest.mark.parametrize("engine", ["jax", "fsdp"])
def test_twice_the_shards_halve_what_is_sharded(engine):
    narrow, wide = (learner_of(f"{engine}:f{shards}", shape="qwen3-8b", topology="h200:8") for shards in (4, 8))
    for name in ("master weights", "Adam moments"):
        assert narrow.resident[name] == pytest.approx(2 * wide.resident[name], rel=1e-3)
    assert narrow.resident.get(WORKSPACES) == wide.resident.get(WORKSPACES)  # of a process
    copies = learner_of(f"{engine}:d8", shape="qwen3-8b", topology="h200:8")
    assert copies.resident == pytest.approx(learner_of(f"{engine}:d1", shape="qwen3-8b", topology="h200:8").resident)


@pytest.mark.parametrize("engine", ["jax", "fsdp"])
def test_twice_the_tokens_take_twice_the_activations_and_full_recomputation_the_hidden_states_alone(engine):
    keys = {**ONE_EPISODE, "actor.gradient_checkpointing": "none"}
    short, long = (learner_of(f"{engine}:d1", **keys, **{"actor.mb_spec.max_tokens_per_row": n}) for n in (4096, 8192))
    assert long.moments["loss"]["activations"] == pytest.approx(2 * short.moments["loss"]["activations"])
    spec = shape_of("qwen3-0.6b")
    keys["actor.gradient_checkpointing"] = "full"
    full = learner_of(f"{engine}:d1", **keys, **{"actor.mb_spec.max_tokens_per_row": 4096})
    assert full.moments["loss"]["activations"] == 2 * spec.hidden_size * spec.num_layers * 4096


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [("qwen3-0.6b", (2, 2, 2)), ("qwen3-0.6b", (1, 8, 1)), ("qwen3-0.6b", (1, 1, 16)), ("smollm2-135m", (1, 9, 3))],
)
def test_bytes_are_those_of_the_shards_that_the_parameters_are_cut_into(shape, sizes):
    """With key/value heads that the tensor axis divides, and with those that stay whole."""
    spec, mesh = shape_of(shape), jax.sharding.AbstractMesh(sizes, AXES)
    shards = [parameter_sharding(p, spec, mesh).shard_shape(p.shape) for p in parameters(spec)]
    data, fsdp, tensor = sizes
    resident = learner_of(f"jax:d{data}f{fsdp}t{tensor}", shape=shape, topology="h100:32").resident
    assert resident["master weights"] == 4 * sum(map(math.prod, shards))


def test_bytes_are_those_of_the_arrays_that_learner_and_sampler_describe(tmp_path):
    spec, mesh = shape_of("qwen3-0.6b"), single_device_mesh()
    write_companions(tmp_path, spec, "bfloat16", None)
    made = plan(request_of("jax:d1+jax:d1"))
    policy = Policy(made.request.config, mesh, tmp_path, described=True)
    master = sum(map(shard_bytes, jax.tree.leaves(policy.trained)))
    assert made.learner.footprint.resident["master weights"] == master
    assert made.learner.footprint.resident["Adam moments"] == 2 * master
    held = Programs(made.request.config, tmp_path, mesh, described=True).held
    weights, cache = (sum(map(shard_bytes, jax.tree.leaves(tree))) for tree in held)
    assert made.sampler.footprint.resident == {"sampler's weights": weights, "KV cache": cache}


@pytest.mark.parametrize("rank", [4, 64])
@pytest.mark.parametrize("engine", ["jax", "fsdp"])
def test_adapters_take_twelve_bytes_per_element_beside_a_base_in_half_precision(engine, rank):
    spec = shape_of("qwen3-0.6b")
    found = dict(learner_of(f"{engine}:d1", **{"actor.lora.rank": rank}).resident)
    workspaces = {WORKSPACES: found.pop(WORKSPACES)} if engine == "fsdp" else {}
    adapters = spec.num_layers * rank * sum(outputs + inputs for outputs, inputs, _ in projections(spec).values())
    assert found == {
        "base weights": 2 * parameter_count(spec),
        "master weights": 4 * adapters,
        "Adam moments": 8 * adapters,
    }
    shared = learner_of(f"{engine}:d1", **{"actor.lora.rank": rank, "actor.kl_ctl": 0.1}).resident  # its base
    assert shared == found | workspaces | {"reference": 2 * adapters}


ROW = {"actor.mb_spec.max_tokens_per_row": 16384, **ONE_EPISODE}
SMOL = {"actor.mb_spec.max_tokens_per_row": 2048, "gconfig.max_new_tokens": 38, **ONE_EPISODE}  # segments of 75
KEPT, FULL = {"actor.gradient_checkpointing": "none"}, {"actor.gradient_checkpointing": "full"}
H200, SMOLLM = {"topology": "h200:1"}, {"topology": "h200:1", "shape": "smollm2-135m", "prompt": 37, "completion": 38}
EIGHT = {"actor.mb_spec.rows_per_mb": 8, "train_dataset.batch_size": 20 * 27}  # so that a minibatch is several micro-batches
MEASURED = {  # docs/benchmarks.md: "A learner's step", GB
    "qwen3 jax": (37.6, "jax:d1", H200, ROW),
    "qwen3 jax, 2048 logits": (32.7, "jax:d1", H200, ROW | {"actor.logprob_chunk": 2048}),
    "qwen3 fsdp": (33.5, "fsdp:d1", H200, ROW | KEPT),
    "qwen3 fsdp, recomputed": (10.9, "fsdp:d1", H200, ROW | FULL | {"actor.logprob_chunk": 1024}),
    "smollm2 jax": (26.8, "jax:d1", SMOLLM, SMOL | {"actor.mb_spec.rows_per_mb": 20}),
    "smollm2 jax, 2048 logits": (25.5, "jax:d1", SMOLLM, SMOL | {"actor.mb_spec.rows_per_mb": 20, "actor.logprob_chunk": 2048}),
    "smollm2 fsdp": (26.0, "fsdp:d1", SMOLLM, SMOL | KEPT | {"actor.mb_spec.rows_per_mb": 20}),
    "smollm2 fsdp, 8 of 20 rows": (12.5, "fsdp:d1", SMOLLM, SMOL | KEPT | EIGHT),
    "smollm2 fsdp, 8 of 20 rows, recomputed": (4.0, "fsdp:d1", SMOLLM, SMOL | FULL | EIGHT),
}
EIGHT_ROWS = {  # docs/plan.md, GB of a step of eight rows of 16,384 tokens, one to a micro-batch, on H200s
    ("fsdp:d1", "qwen3-0.6b"): 14.22,
    ("fsdp:f2", "qwen3-0.6b"): 9.48,
    ("fsdp:c2", "qwen3-0.6b"): 9.54,
    ("fsdp:d1", "qwen3-1.7b"): 34.32,
    ("jax:d1", "qwen3-0.6b"): 40.56,
    ("jax:f2", "qwen3-0.6b"): 32.88,
    ("jax:d1", "qwen3-1.7b"): 40.53,
}
TRAINED_ALL = {"prompt": 1, **ONE_EPISODE}
COMPILED = {  # docs/plan.md, GB of the update: GB, shape, topology, allocation_mode, rows per micro-batch, tokens per row
    "v5e": (3.37, "qwen3-0.6b", "v5e:2x4", "jax:d2f2t2", 1, 4096),
    "v6e": (5.485, "qwen3-0.6b", "v6e:2x4", "jax:d2f2t2", 1, 4096),
    "v5p": (5.48, "qwen3-0.6b", "v5p:2x2x2", "jax:d2f2t2", 1, 4096),
    "smollm2": (2.990, "smollm2-135m", "v5e:2x4", "jax:f8", 1, 4096),
    "qwen3-8b": (11.024, "qwen3-8b", "v5e:4x4", "jax:f8t2", 1, 4096),
    "28 rows": (13.592, "qwen3-0.6b", "v5e:2x4", "jax:d2f2t2", 28, 4096),
    "92 rows": (13.718, "smollm2-135m", "v5e:2x2", "jax:f4", 92, 2048),
    "qwen2.5-0.5b": (12.119, "qwen2.5-0.5b", "v5e:2x4", "jax:f8", 12, 8192),
    "qwen2.5-1.5b": (11.846, "qwen2.5-1.5b", "v5e:2x4", "jax:f8", 10, 4096),
    "qwen3-1.7b": (12.561, "qwen3-1.7b", "v5e:2x4", "jax:f4t2", 12, 4096),
    "qwen3-8b, 3 rows": (14.100, "qwen3-8b", "v5e:4x4", "jax:f8t2", 3, 4096),
    "qwen3-14b": (78.683, "qwen3-14b", "v5p:2x2x2", "jax:f8", 4, 16384),
    "llama3.1-8b": (27.060, "llama3.1-8b", "v6e:2x4", "jax:f8", 5, 4096),
}


SLOPES = {  # docs/plan.md, GiB of the update of a row of 4,096 in chunks of 2,048 logits, recomputed
    ("qwen3-0.6b", "v6e:2x4"): 3.80,
    ("qwen3-1.7b", "v6e:2x4"): 6.14,
    ("qwen2.5-0.5b", "v6e:2x4"): 3.53,
    ("smollm2-135m", "v6e:2x4"): 1.13,
    ("smollm2-135m", "v5p:2x2x2"): 1.13,
    ("qwen3-0.6b", "v5e:2x4"): 3.29,
}


@pytest.mark.parametrize(("shape", "topology"), SLOPES)
def test_slopes_of_logits_count_on_a_tpu_where_its_compiler_keeps_them(shape, topology):
    keys = {"actor.logprob_chunk": 2048, "actor.mb_spec.max_tokens_per_row": 4096} | FULL
    peak = learner_of("jax:f8", shape=shape, topology=topology, completion=4095, **(TRAINED_ALL | keys)).peak
    assert peak == pytest.approx(GIB * SLOPES[shape, topology], rel=0.04)


@pytest.mark.parametrize("case", MEASURED)
def test_a_learner_is_within_a_twentieth_of_the_peak_that_was_measured(case):
    gigabytes, mode, place, keys = MEASURED[case]
    assert learner_of(mode, **place, **keys).peak == pytest.approx(1e9 * gigabytes, rel=0.05)


@pytest.mark.parametrize(("mode", "shape"), EIGHT_ROWS)
def test_a_learner_of_several_micro_batches_is_as_large_as_measured_on_one_gpu_and_on_two(mode, shape):
    planned, measured = learner_gb(mode, shape, "h200:2", 8, 16384, 16), EIGHT_ROWS[mode, shape]
    assert planned == pytest.approx(measured, rel=0.01 if mode.startswith("fsdp") else 0.05)
    page = (REPOSITORY / "docs/plan.md").read_text()
    assert f" | {planned:.2f} | {measured:.2f} | {100 * (planned / measured - 1):+.1f}% |" in page


@pytest.mark.parametrize("trained", [1, 300, 1000])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_micro_batch_is_planned_as_the_learner_cuts_it(ranks, rows, trained):
    """The last rank of a context group counts, with a trajectory that fills its row."""
    length = 1024
    batch = full_batch(8 * rows, length)
    keep = np.zeros((8 * rows, length), bool)
    keep[:, length - trained :] = True
    last = SimpleNamespace(context=Context(ranks - 1, ranks), data_shard=(0, 1), device=torch.device("cpu"))
    real = next(iter(micro_batches(batch, keep, last, shape_of("tiny"), rows)))
    keys = {"actor.mb_spec.rows_per_mb": rows, "actor.mb_spec.max_tokens_per_row": length}
    config = request_of(f"fsdp:c{ranks}", shape="tiny", **keys).config
    cut = Cut.of(config, Pool("fsdp", context=ranks), Load(length - trained, trained))
    assert (cut.rows, cut.tokens, cut.scored) == (real.segments.ids.shape[0], real.token_ids.numel(), real.labels.numel())
    assert (cut.whole, cut.keys) == (real.segments.ids.numel(), int(real.segments.key_starts[-1]))


@pytest.mark.parametrize("case", COMPILED)
def test_a_learner_is_within_a_tenth_of_the_peak_that_the_tpu_compiler_says(case):
    gigabytes, shape, topology, mode, rows, tokens = COMPILED[case]
    keys = {"actor.mb_spec.rows_per_mb": rows, "actor.mb_spec.max_tokens_per_row": tokens, "completion": tokens - 1}
    keys |= {"actor.logprob_chunk": 2048} if rows == 1 else {}
    footprint = learner_of(mode, shape=shape, topology=topology, **(TRAINED_ALL | keys))
    assert footprint.peak == pytest.approx(1e9 * gigabytes, rel=0.1)


@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen3-0.6b", "qwen3-1.7b"])
def test_a_learner_is_planned_for_the_positions_that_the_measured_batch_scores(shape):
    """A row of 1,026 trained tokens takes the next eighth of 2,048, as a plan of trajectories of 37 and 38 tokens has it."""
    for case in learners(shape):
        batch = case.rows.batch(shape_of(shape).vocab_size)
        scored = compact(batch, kept(batch)).tokens.mask.size
        hidden = 2 * 2 * shape_of(shape).hidden_size  # bfloat16, and their gradient
        hidden += 8 * shape_of(shape).hidden_size if case.mode.startswith("fsdp") else 0  # torch's index of each element
        assert case.plan("h200:1").learner.footprint.moments["loss"]["hidden states that are scored"] == hidden * scored


def test_the_page_has_the_plans_of_what_was_measured_on_a_gpu_within_a_tenth():
    cases = [case for shape in ("smollm2-135m", "qwen3-0.6b", "qwen3-1.7b") for case in learners(shape)]
    for shape in ("qwen3-0.6b", "qwen3-1.7b"):
        after = max(i for i, case in enumerate(cases) if case.shape == shape)
        cases[after + 1 : after + 1] = samplers(shape, sglang=False)
    page = (REPOSITORY / "docs/plan.md").read_text()
    rows = page.partition("| on one H200 | planned | measured | |\n")[2].partition("\n\n")[0].splitlines()[1:]
    for case, row in zip(cases, rows, strict=True):
        name, planned, measured, off = (cell.strip() for cell in row.strip("|").split("|"))
        assert case.what.split()[-1] in name.replace("`", ""), (case.what, name)
        assert float(planned) == pytest.approx(case.planned("h200:1") / 1e9, abs=0.005), name
        assert float(off.rstrip("%")) == pytest.approx(100 * (float(planned) / float(measured) - 1), abs=0.15), name
        assert float(planned) == pytest.approx(float(measured), rel=0.1), name


@pytest.mark.parametrize(("topology", "compiled"), [("v5e:2x4", 5.65), ("h100:8", 6.44)])
def test_a_slope_in_float32_takes_the_place_of_its_logits(topology, compiled):
    """GiB as the compilers have them, of algorithms/grpo with Qwen3-0.6B (docs/plan.md)."""
    keys = {"actor.dtype": "float32", "actor.mb_spec.max_tokens_per_row": 64, "actor.mb_spec.rows_per_mb": 24}
    keys |= {"gconfig.max_new_tokens": 4, "actor.kl_ctl": 0.001, **ONE_EPISODE}
    footprint = learner_of("jax:f8", topology=topology, prompt=1, completion=63, **keys)
    loss = footprint.moments["loss"]
    assert loss["logits"] == 4 * 24 * 64 * shape_of("qwen3-0.6b").vocab_size
    assert footprint.held + sum(loss.values()) == pytest.approx(GIB * compiled, rel=0.06)


def test_a_sampler_is_as_large_as_measured():
    keys = {"jax.slots": 256, "jax.context_length": 2048, "jax.prefill_chunk": 2048}
    footprint = plan_of("jax:d1+jax:d1", topology="h200:2", **keys).sampler.footprint
    assert footprint.resident["KV cache"] == pytest.approx(60.1e9, rel=0.01)
    decoding = footprint.held + sum(footprint.moments["decoding"].values())
    assert decoding == pytest.approx(62.2e9, rel=0.02)


def test_a_cache_takes_what_is_free_beside_a_learner_and_at_least_one_request_s_room():
    keys = {"jax.slots": 512, "jax.context_length": 8192}
    roomy, tight = (plan_of("jax:d1", shape=shape, topology="h100:1", **keys) for shape in ("qwen3-1.7b", "qwen3-8b"))
    sampler, learner = roomy.sampler.footprint.resident, roomy.learner.footprint
    (group,) = roomy.groups
    free = group.usable - learner.held - sampler["sampler's weights"]
    assert sampler["KV cache"] == pytest.approx(0.9 * free, rel=1e-3)
    assert tight.sampler.room == 8192 and not tight.fits


def test_moments_of_two_sides_coincide_unless_one_lends_its_memory():
    first = Footprint({"a": 1.0}, {"x": {"b": 2.0}, "y": {"b": 4.0}})
    second = Footprint({"c": 8.0}, {"z": {"d": 16.0}})
    assert together(first, second).peak == 1 + 4 + 8 + 16
    assert in_turn(first, second).peak == max(1 + 4 + 8, 8 + 16)


def test_weights_are_handed_over_between_two_steps():
    """Both sides take part in it, so no other moment of one coincides with it."""
    sampler = Footprint({}, {"decoding": {"a": 1.0}, "publishing": {"b": 64.0}})
    learner = Footprint({}, {"loss": {"c": 4.0}, "publishing": {"d": 2.0}})
    assert together(sampler, learner).peak == 64 + 2
    assert together(sampler, Footprint({}, {"loss": {"c": 128.0}, "publishing": {"d": 2.0}})).peak == 1 + 128


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_sampler_that_is_split_by_fsdp_joins_no_matrices_but_gathers_the_unembedding(tensor):
    """Peaks of the decode steps as a TPU's compiler says them (docs/plan.md) are held to a tenth below."""
    copies, split = (
        plan_of(mode, shape="qwen3-8b", topology="v5p:2x2x2").sampler.footprint.moments["decoding"]
        for mode in (f"jax:d4t{tensor}", f"jax:f4t{tensor}")
    )
    spec = shape_of("qwen3-8b")
    inputs = spec.hidden_size * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    assert copies["joined matrices"] == 2 * spec.num_layers * (inputs + 2 * spec.hidden_size * spec.intermediate_size) / tensor
    assert "joined matrices" not in split
    table, widest = (2 * spec.hidden_size * width / tensor for width in (spec.vocab_size, spec.intermediate_size))
    assert split["weights gathered for use"] == table + 2 * widest


@pytest.mark.parametrize(
    ("shape", "dtype", "slots", "context", "compiled"),
    [
        ("qwen3-0.6b", "float32", 256, 64, 5.28),
        ("qwen3-0.6b", "bfloat16", 64, 2048, 3.64),
        ("qwen3-8b", "bfloat16", 64, 2048, 37.57),
    ],
)
def test_on_a_gpu_a_sampler_that_is_split_by_fsdp_gathers_its_weights_ahead(shape, dtype, slots, context, compiled):
    """GiB of the decode step over 8 as XLA's compiler has it, with jax 0.11.2 (docs/plan.md)."""
    keys = {"jax.sampler_dtype": dtype, "jax.cache_dtype": dtype, "jax.slots": slots, "jax.context_length": context}
    keys["gconfig.max_new_tokens"] = 4
    footprint = plan_of("jax:f8", shape=shape, **keys).sampler.footprint
    decoding = footprint.moments["decoding"]
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert decoding["weights gathered for use"] == 2 * size * parameter_count(shape_of(shape))
    assert footprint.held + sum(decoding.values()) == pytest.approx(GIB * compiled, rel=0.15)


DECODE = {  # docs/plan.md, GiB of the decode step: GiB, shape, topology, allocation_mode
    "qwen3-32b v5p": (13.87, "qwen3-32b", "v5p:2x2x2", "jax:f8"),
    "qwen3-32b v6e": (7.30, "qwen3-32b", "v6e:4x4", "jax:f8t2"),
    "qwen3-8b v5e": (5.53, "qwen3-8b", "v5e:2x4", "jax:f8"),
}


@pytest.mark.parametrize("case", DECODE)
def test_a_sampler_is_within_a_tenth_of_the_peak_that_the_tpu_compiler_says(case):
    size, shape, topology, mode = DECODE[case]
    footprint = plan_of(mode, shape=shape, topology=topology).sampler.footprint
    assert footprint.held + sum(footprint.moments["decoding"].values()) == pytest.approx(GIB * size, rel=0.1)


def test_a_config_that_does_not_fit_fits_with_the_change_that_says_so():
    before = plan_of("sglang:d4+fsdp:d1", shape="qwen3-8b")
    assert not before.fits
    found = changes(before)
    assert [change.saved for change in found] == sorted((change.saved for change in found), reverse=True)
    remedies = [change for change in found if change.plan.fits]
    assert {change.key for change in remedies} >= {"actor.lora.rank", "allocation_mode"}
    for change in remedies:  # the flag that is printed makes the same config
        key, _, value = str(change).removeprefix("--config.").partition("=")
        again = plan(dataclasses.replace(before.request, config=changed(before.request, key, change.value)))
        assert str(change.value) == value and again.fits
        peaks = {group.name: group.footprint.peak for group in again.groups}
        saved = max(group.footprint.peak - peaks[group.name] for group in before.groups)
        assert saved == pytest.approx(change.saved)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_shards_are_doubled_until_they_fit_or_the_devices_are_used_up(devices):
    before = plan_of("jax:d1", shape="qwen3-8b", topology=f"h100:{devices}")
    wider = {str(change.value): change.plan.fits for change in changes(before) if change.key == "allocation_mode"}
    tried = [2**i for i in range(1, devices.bit_length())]  # 2, 4, ... devices
    fitting = [n for n in tried if plan_of(f"jax:f{n}", shape="qwen3-8b", topology=f"h100:{devices}").fits]
    assert wider == {f"jax:f{n}": n in fitting for n in tried if not fitting or n <= fitting[0]}


@pytest.mark.parametrize("mode", ["jax:d1", "sglang:d1|fsdp:d1"])
def test_the_largest_micro_batch_fits_and_the_next_does_not(mode):
    before = plan_of(mode, **{"sglang.mem_fraction_static": 0.3, "jax.slots": 8})
    for key, step, found in (
        ("actor.mb_spec.rows_per_mb", 1, largest_rows(before)),
        ("actor.mb_spec.max_tokens_per_row", 128, longest_row(before)),
    ):
        at, beyond = (
            plan(dataclasses.replace(before.request, config=changed(before.request, key, count))).fits
            for count in (found, found + step)
        )
        assert at and not beyond, key


def test_the_side_that_is_slower_keeps_the_other_waiting():
    fast = plan_of("sglang:d7+fsdp:f1", shape="qwen3-1.7b").rates
    slow = plan_of("sglang:d1+fsdp:f7", shape="qwen3-1.7b", **{"gconfig.max_new_tokens": 512}).rates
    assert fast.waits == "sampler" and fast.step_seconds == fast.learner_seconds
    assert slow.step_seconds == max(slow.learner_seconds, slow.sampler_seconds)
    shared = plan_of("sglang:d1|fsdp:d1", shape="qwen3-1.7b", **{"sglang.mem_fraction_static": 0.3}).rates
    assert shared.step_seconds == shared.learner_seconds + shared.sampler_seconds and not shared.waits


@pytest.mark.parametrize(("mode", "keys"), [("sglang:d7+fsdp:f1", {}), ("sglang:d1+fsdp:f7", {}), ("jax:f4+jax:f4", {})])
def test_the_balanced_split_is_the_fastest_of_those_that_fit(mode, keys):
    shape = "llama3.1-8b"
    sampler, learner = (pool.split(":") for pool in mode.split("+"))
    steps = {}
    for count in range(1, 8):
        split = f"{sampler[0]}:{sampler[1][0]}{count}+{learner[0]}:{learner[1][0]}{8 - count}"
        try:
            each = plan_of(split, shape=shape, **keys)
        except UserError:  # jax:f3 of 4096
            continue
        if each.fits:
            steps[str(each.allocation)] = each.rates.step_seconds
    found = balanced(plan_of(mode, shape=shape, **keys))
    assert found.rates.step_seconds == min(steps.values()) == steps[str(found.allocation)]


@pytest.mark.parametrize(("topology", "host"), [("h100:24", 8), ("v6e:4x4", 4)])
def test_of_several_hosts_the_balanced_split_gives_each_to_one_side(topology, host):
    engine = "jax" if topology.startswith("v6e") else "sglang"
    mode = f"{engine}:d{host}+{'jax' if engine == 'jax' else 'fsdp'}:f{host}"
    found = balanced(plan_of(mode, shape="qwen3-1.7b", topology=topology), host_of(Topology.parse(topology)))
    assert host_of(Topology.parse(topology)) == host
    assert found.allocation.sampler.size % host == found.allocation.learner.size % host == 0
    assert found.allocation.devices == Topology.parse(topology).devices


def test_no_split_is_balanced_where_none_fits_or_the_sides_share_their_devices():
    large = plan_of("jax:f8+jax:f8", shape="qwen3-32b", topology="v6e:4x4")
    assert large.rates.waits and balanced(large) is None and "no split of the 16 devices fits" in str(Report.of(large))
    assert balanced(plan_of("jax:f8", shape="qwen3-0.6b")) is None


LONG = {"actor.mb_spec.max_tokens_per_row": 32768, "jax.context_length": 32768, "gconfig.max_new_tokens": 31000}
CRITIC = {  # of llama3.1-8b, on four H100s: rows come to about 2,700 tokens
    **{
        "actor.dtype": "float32",
        "actor.adv_estimator": "gae",
        "actor.reward_norm.mean_level": "none",
        "critic.optimizer.lr": 1e-3,
    },
    **{"gconfig.max_new_tokens": 4, "actor.gradient_checkpointing": "none"},
}
HINTED = {  # shape, topology, allocation_mode, keys
    "a row of 64": (
        *("llama3.1-8b", "h100:8", "sglang:d4+fsdp:f4"),
        CRITIC | {"actor.mb_spec.max_tokens_per_row": 64, "actor.mb_spec.rows_per_mb": 24},
    ),
    "no row is shorter": ("smollm2-135m", "h100:1", "jax:d1", LONG),
    "a large cache": ("qwen3-0.6b", "h100:1", "jax:d1", LONG),
    "many slots": ("qwen3-8b", "v5p:2x2x2", "jax:f8", LONG | {"jax.slots": 512}),
    "long prompts": (
        "qwen3-0.6b",
        "h100:2",
        "jax:d1+fsdp:d1",
        {"train_dataset.max_length": 1500, "actor.mb_spec.rows_per_mb": 99},
    ),
    "rows in several devices": ("llama3.1-8b", "v6e:4x4", "jax:f8+jax:f8", {}),
}


@pytest.mark.parametrize("case", HINTED)
def test_each_hint_is_one_that_a_run_takes_and_says_what_becomes_of_it(case):
    shape, topology, mode, keys = HINTED[case]
    request = request_of(mode, shape=shape, topology=topology, prompt=None, completion=None, **keys)
    report = Report.of(plan(request))
    rows = request.config.actor.mb_spec
    hints = [(change.key, change.value, change.plan.fits) for change in report.changes]
    hints += [("allocation_mode", str(report.balanced.allocation), True)] if report.balanced else []
    for key, found, own in (
        ("actor.mb_spec.rows_per_mb", report.rows, rows.rows_per_mb),
        ("actor.mb_spec.max_tokens_per_row", report.tokens, rows.max_tokens_per_row),
    ):
        hints += [] if found is None else [(key, found, True)]
        assert not report.plan.fits or found >= own
    for key, value, fits in hints:
        config = changed(request, key, value)
        checks.check(config)
        again = plan(dataclasses.replace(request, config=config))
        assert again.fits == fits, key
    assert report.plan.fits or any(fits for *_, fits in hints)


@pytest.mark.parametrize(("rows", "own"), [(24, 64), (12, 130), (43, 64)])
def test_the_longest_row_is_a_multiple_if_one_fits_and_no_shorter_than_a_row_that_fits(rows, own):
    keys = CRITIC | {"actor.mb_spec.rows_per_mb": rows, "actor.mb_spec.max_tokens_per_row": own}
    before = plan_of("sglang:d4+fsdp:f4", shape="llama3.1-8b", prompt=16, completion=4, **keys)
    found = longest_row(before)

    def fits(tokens):
        config = changed(before.request, "actor.mb_spec.max_tokens_per_row", tokens)
        return plan(dataclasses.replace(before.request, config=config)).fits

    assert fits(found) and not fits(found + (128 if found >= 128 else 1))
    assert found >= own or not before.fits


@pytest.mark.parametrize(
    ("key", "case"), [("jax.cache_tokens", "a large cache"), ("jax.slots", "a large cache"), ("jax.cache_tokens", "many slots")]
)
def test_a_number_is_halved_until_it_fits_and_no_further(key, case):
    shape, topology, mode, keys = HINTED[case]
    before = plan_of(mode, shape=shape, topology=topology, **keys)
    (change,) = (each for each in changes(before) if each.key == key)
    twice = changed(before.request, key, 2 * change.value)
    assert change.plan.fits and not plan(dataclasses.replace(before.request, config=twice)).fits


def test_device_hours_are_those_of_all_devices_and_steps():
    rates = plan_of("sglang:d4+fsdp:f4", total_train_steps=90).rates
    assert rates.device_hours == pytest.approx(90 * rates.step_seconds * 8 / 3600)
    assert plan_of("sglang:d4+fsdp:f4").rates.device_hours is None


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_about_the_parameters_that_its_name_says(name):
    size = name.rpartition("-")[2]
    if size == "tiny":
        return
    told = float(size[:-1]) * {"b": 1e9, "m": 1e6}[size[-1]]
    assert parameter_count(shape_of(name)) == pytest.approx(told, rel=0.24)  # llama3.2-1b has 1.24


@pytest.mark.parametrize(("name", "devices"), [("v5e:2x4", 8), ("v5p:4x4x4", 64), ("tpu7x:2x2x1", 8), ("h100:8", 8)])
def test_a_topology_is_its_devices(name, devices):
    assert Topology.parse(name).devices == devices


@pytest.mark.parametrize("name", ["h100", "h100:0", "h10:8", "v5e:2x", "gh200:1", ""])
def test_a_topology_that_is_none_is_refused_by_name(name):
    with pytest.raises(UserError, match="--topology: "):
        Topology.parse(name)


def test_each_chip_is_found_by_the_name_that_its_framework_reports():
    for chip in CHIPS:
        assert chip_of(f"NVIDIA {chip.kind}" if chip.platform == "gpu" else chip.kind) is chip
    assert chip_of("NVIDIA H100 80GB HBM3").memory == 79 * GIB
    assert chip_of("cpu") is None


@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip.platform == "tpu"], ids=lambda chip: chip.name)
def test_a_tpu_is_as_fast_and_as_large_as_jax_has_it(chip):
    version, cores = pallas_tpu.ChipVersion(chip.name.removeprefix("tpu")), 2 if chip.name in ("v4", "v5p") else 1
    info = pallas_tpu.get_tpu_info_for_chip(version, cores)  # of one core
    assert chip.flops == pytest.approx(cores * info.bf16_ops_per_second, rel=0.01)
    assert chip.memory == pytest.approx(cores * info.hbm_capacity_bytes, rel=0.01)
    # Google's page has 2,765 GB/s for v5p, JAX 2,460.
    assert chip.bandwidth == pytest.approx(cores * info.mem_bw_bytes_per_second, rel=0.13 if chip.name == "v5p" else 0.01)


@pytest.mark.parametrize(
    ("mode", "topology", "line"),
    [
        ("jax:d9", "h100:8", "allocation_mode: jax:d9 needs 9 devices, and h100:8 has 8"),
        ("fsdp:d1", "v5e:2x4", "--topology: v5e is a TPU, and fsdp"),
        ("jax:t3", "h100:8", "allocation_mode: t3 does not divide the model's 16 attention heads"),
        ("jax:d3", "h100:8", "jax.slots: 64 is not a multiple of the 3 data shards"),
        ("fsdp:t3", "h100:8", "allocation_mode: t3 does not divide the model's 16 attention heads"),
        ("sglang:t3+fsdp:d1", "h100:8", "allocation_mode: t3 does not divide the model's 16 attention heads"),
        ("fake:d1", "h100:8", "allocation_mode: the engine fake can't be planned for"),
    ],
)
def test_what_can_t_be_planned_is_one_line(mode, topology, line):
    with pytest.raises(UserError, match=f"^{line}"):
        plan_of(mode, topology=topology)


@pytest.mark.parametrize("topology", ["h100:2", "v5e:1x2"])
@pytest.mark.parametrize("key", ["attention", "decode_attention"])
def test_a_kernel_is_planned_for_on_the_devices_that_have_it(key, topology):
    choices = next(field for field in dataclasses.fields(JaxConfig) if field.name == key).metadata
    kernels = [name for declared in choices.values() for name in declared.choices]
    platform = Topology.parse(topology).chip.platform
    assert PLATFORMS.keys() & kernels
    for kernel in kernels:
        keys = {f"jax.{key}": kernel}
        if PLATFORMS.get(kernel, platform) == platform:
            assert plan_of("jax:d1+jax:d1", topology=topology, **keys).groups
        else:
            with pytest.raises(UserError, match=f"^jax.{key}: {kernel} can't be used on .*: it needs a"):
                plan_of("jax:d1+jax:d1", topology=topology, **keys)


def test_json_says_what_the_text_says_and_is_json():
    made = plan_of("sglang:d4+fsdp:d1", shape="qwen3-8b")
    report = Report.of(made)
    found = json.loads(json.dumps(report.json()))
    assert found["fits"] is False and "verdict: does not fit on h100:8" in str(report)
    for group in found["groups"]:
        assert math.isclose(sum(group["components"].values()), group["peak"])
        assert group["peak"] == pytest.approx(max(group["moments"].values()))
    first = report.changes[0]
    assert found["changes"][0]["key"] == first.key and str(first) in str(report)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("actor.dtype", "float32", "float32;"),
        ("actor.mb_spec.max_tokens_per_row", 1792, "x 1792 tokens"),
        ("actor.mb_spec.rows_per_mb", 3, "of 3 x"),
        ("gconfig.max_new_tokens", 333, "up to 333 tokens"),
        ("gconfig.n_samples", 7, ", 7 completions"),
        ("train_dataset.batch_size", 17, "of 17 prompts"),
    ],
)
def test_a_plan_begins_with_the_sizes_that_it_is_of(key, value, word):
    with_it, without = (str(Report(plan_of("jax:d1", **keys), [], None, None, None)) for keys in ({key: value}, {}))
    assert word in with_it.splitlines()[1] and word not in without.splitlines()[1]


def test_a_run_on_devices_of_unknown_size_has_its_bytes_and_no_verdict_on_them(tmp_path):
    request = request_of("jax:d1+fsdp:d1")
    write_companions(tmp_path, request.spec, "bfloat16", None)
    found = estimate_of(request.config, tmp_path, [], 2, find_plugin)
    known = estimate_of(request.config, tmp_path, ["NVIDIA H200", "NVIDIA H200"], 2, find_plugin)
    assert found["topology"] == "cpu:2" and found["rates"] is None and known["rates"] is not None
    for ours, theirs in zip(found["groups"], known["groups"], strict=True):
        assert ours["usable"] is None and theirs["usable"] > 100e9 and ours["peak"] > 0
    assert json.dumps(found, allow_nan=False)
    assert estimate_of(io.load("base", [("allocation_mode", "fake:d1")]), tmp_path, [], 1, find_plugin) is None


def test_what_was_measured_is_beside_the_estimate(tmp_path):
    run = RunDirectory(tmp_path)
    sink = PlanSink(run, {"topology": "cpu:1"})
    assert json.loads((tmp_path / "plan.json").read_text()) == {"estimated": {"topology": "cpu:1"}, "measured": {}}
    steps = [(10, 1.0, 1), (30, 7.0, 2), (20, 4.0, 6), (20, 5.0, 4)]  # the first one compiles
    for step, (peak, tokens, seconds) in enumerate(steps):
        sink.write(
            step,
            {
                "memory/learner_peak_bytes": Mean(peak, 1),
                "timeperf/learner_tokens_per_s": Mean(tokens, seconds),
                "timeperf/wall": Mean(step, 1),
            },
        )
        sink.write(step, {"rollout/reward": Mean(1, 1), "timeperf/wall": Mean(9, 1)})
    sink.close()
    measured = json.loads((tmp_path / "plan.json").read_text())["measured"]
    assert measured == {"memory/learner_peak_bytes": 30, "timeperf/learner_tokens_per_s": 16 / 12, "timeperf/wall": 2}
    run.close()


def command(*arguments):
    script = (
        "import runpy, sys, atexit\n"
        "atexit.register(lambda: print(*(m for m in ('jax', 'torch', 'transformers') if m in sys.modules), sep=','))\n"
        "sys.argv[0] = 'plan'\n"
        "runpy.run_module('experiments.plan', run_name='__main__', alter_sys=True)\n"
    )
    line = [sys.executable, "-c", script, "--config=configs/quickstart.py", *arguments]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["--topology=v5e:2x4", "--topology=h100:8"], 0, ""),
        (["--topology=h100:1", "--topology=v5e:1x1", "--shape=qwen3-8b"], 2, ""),
        (
            ["--config=base", "--topology=h100:1", "--topology=v5e:1x1", "--shape=qwen3-8b"],
            2,
            "",
        ),  # that has neither model nor data
        (
            ["--topology=h100:1", "--programs=update"],
            1,
            "error: --programs: 'update' chooses among the programs that --compile",
        ),
        (["--topology=cpu:1"], 1, "error: --topology: CPUs have no plan"),
        (["--topology=h10:1"], 1, "error: --topology: 'h10:1' is none"),
        (["--topology=h100:12", "--topology=v5e:3x3"], 1, "error: --topology: v5e:3x3 is no slice of v5e (as in v5e:4x4)"),
        ([], 1, "error: --topology: missing"),
        (["--topology=h100:1", "--config.allocation_mode=sglang:d1"], 1, "error: allocation_mode: sglang:d1 only samples"),
        (["--topology=h100:1", "--prompt_tokens=17"], 1, "error: --prompt_tokens: 17 is more than 15: jax.context_length=16"),
        (["--topology=h100:1", "--shape=qwen3-8"], 1, "error: --shape: no model named 'qwen3-8' (did you mean qwen3-8b"),
    ],
)
def test_the_exit_status_is_the_verdict_and_no_framework_is_needed(arguments, status, line):
    done = command(*arguments)
    assert done.returncode == status and done.stderr.startswith(line) and done.stderr.count("\n") == bool(line)
    *shown, heavy = done.stdout.splitlines()
    assert heavy == ""
    verdicts = [each for each in shown if each.startswith("verdict:")]
    assert status == 1 or len(verdicts) == sum(argument.startswith("--topology") for argument in arguments)
    assert any("does not fit" in each for each in verdicts) == (status == 2)


def test_pools_over_several_hosts_are_warned_of_and_do_not_change_the_verdict():
    """A host of a 4x4 slice has 4 devices, a 2x4 slice is one host."""
    arguments = ["--config=base", "--shape=qwen3-8b", "--topology=v6e:4x4", "--topology=v6e:2x4"]
    text = command(*arguments, "--config.allocation_mode=jax:f8")
    warned, alone = text.stdout.split("verdict: ")[1:]
    assert text.returncode == 0 and "warning" not in alone
    assert "\nwarning: allocation_mode: jax:f8 shares its devices, which only the pools of one host can do" in warned
    told = command(*arguments, "--config.allocation_mode=jax:f4", "--json")
    several, one = json.loads(told.stdout.splitlines()[0])
    assert several["warnings"] == one["warnings"] == []
    wider = [[change["value"] for change in each["changes"] if change["key"] == "allocation_mode"] for each in (several, one)]
    assert wider == [[], ["jax:f8"]]


@pytest.mark.parametrize("family", ["phi3", "olmo2", "gemma2", "opt"])
def test_a_family_without_a_plan_is_named_with_what_can_be_planned_instead(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "hidden_size": 64}))
    with pytest.raises(UserError, match=rf"^actor.path: a plan knows the layers of llama, .*{family} \(--shape=NAME"):
        shape_in(str(tmp_path))
