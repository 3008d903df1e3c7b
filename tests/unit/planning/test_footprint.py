"""Bytes add up, scale as the shards do, and are those of the arrays that a run makes."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch

from rljax.backends.jax.parameters import parameters
from rljax.backends.jax.sharding import AXES, parameter_sharding, single_device_mesh
from rljax.backends.torch.context_parallel import Context
from rljax.batching.full import full_batch
from rljax.config.allocation import Pool
from rljax.engines.cuda.learning.rows import micro_batches
from rljax.engines.cuda.planning.footprint import Cut
from rljax.engines.jax.learning.policy import Policy
from rljax.engines.jax.sampling.cache_size import shard_bytes
from rljax.engines.jax.sampling.programs import Programs
from rljax.hf.companion_files import write_companions
from rljax.hf.shapes import shape_of
from rljax.hf.tensors import parameter_count, projections
from rljax.planning.estimate import plan
from rljax.planning.footprint import Footprint, in_turn, together
from rljax.planning.load import Load
from tests.unit.planning.plans import ONE_EPISODE, WORKSPACES, learner_of, plan_of, request_of


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
    """Holds with key/value heads that the tensor axis divides, and with those that stay whole."""
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
