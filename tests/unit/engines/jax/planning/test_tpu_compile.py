"""Programs lowered from shapes are those of a run, and they compile for TPUs with their kernels."""

import importlib.util

import jax
import pytest

from rljax.backends.jax.sharding import single_device_mesh
from rljax.chips import GIB, Topology, chip_of
from rljax.config.allocation import Pool
from rljax.engines.jax.learning.learner import JaxLearner
from rljax.engines.jax.planning import hlo, topology
from rljax.engines.jax.sampling.programs import Programs
from rljax.engines.jax.tuning import remat_of
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.testing import models
from rljax.testing.learner_batches import config_of

CONFIG = {
    "actor.dtype": "bfloat16",
    "actor.mb_spec.max_tokens_per_row": 256,
    "actor.mb_spec.rows_per_mb": 1,
    "jax.slots": 8,
    "jax.context_length": 256,
}
LARGE_CACHE = {  # a layer's is larger than the memory on a core, where XLA would move a smaller one
    "jax.slots": 256,
    "jax.context_length": 8192,
    "jax.page_size": 128,
    "jax.prefill_chunk": 128,
    "jax.sampler_dtype": "bfloat16",
    "jax.cache_dtype": "bfloat16",
}
SPLASH = {"splash_mha_fwd_segmented_residuals", "splash_mha_dkv_segmented_no_residuals", "splash_mha_dq_segmented_no_residuals"}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="left out: libtpu is not installed (pip install 'rljax[tpu]')"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return models.make_model(tmp_path_factory.mktemp("model"), architecture="qwen3")


def shapes(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)


REFUSED = (  # by libtpu 0.0.42.1: Qwen3-0.6B, 42 rows of 4,096, v5e
    "update: does not fit a device (fewer rows or slots, or more shards): RESOURCE_EXHAUSTED: Ran out of memory on HBM, the"
    " total memory required for HLO temporaries (17.82G) exceeds available HBM (15.75G)."
)


def test_what_a_refused_program_would_need_is_what_the_refusal_says_not_what_there_is():
    assert hlo.needed(REFUSED) == pytest.approx(17.82 * GIB)
    assert hlo.needed(REFUSED.replace("17.82G", "512M")) == GIB / 2
    assert hlo.needed("RESOURCE_EXHAUSTED: Ran out of memory on HBM") is None


CALLS = """
  %write_pages.2.kv_pages_hbm_ref = bf16[64,64]{1,0} custom-call(%new_ref), custom_call_target="tpu_custom_call"
  %write_pages.13 = bf16[64,64]{1,0} custom-call(%new), custom_call_target="tpu_custom_call"
  ROOT %write_pages = bf16[64,64]{1,0} custom-call(%new.2), custom_call_target="tpu_custom_call"
  %splash_mha_fwd.1.2 = (f32[8]{0}, f32[8]{0}) custom-call(%q), custom_call_target="tpu_custom_call"
  %gather.7 = s32[8]{0} custom-call(%write_pages.13), custom_call_target="AssumeGatherIndicesInBound"
"""  # as with jax 0.11.2, with 0.10.2, and as a computation's result


def test_a_kernel_s_name_is_without_what_the_compiler_adds_to_it():
    assert hlo.kernels(CALLS) == {"write_pages": 3, "splash_mha_fwd": 1}


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_a_learner_s_programs_from_shapes_are_those_of_a_run(model_dir, rank):
    """The same text on devices that are there, from arrays and from their shapes."""
    config = config_of(**CONFIG, **{"actor.lora.rank": rank, "jax.sampler_dtype": "bfloat16"})
    targets = {t.name: t for t in topology.learner_targets(config, Pool("jax"), model_dir, jax.devices()[:1])}
    assert list(targets) == ["score", "update", "accumulate", "apply"]
    learner = JaxLearner(config, Pool("jax"), model_dir)
    batch, policy, phase = targets["update"].batch, learner._policy, learner._phases.rl.actor
    part = learner._cut(batch, batch.loss_mask).parts[0]
    with jax.sharding.use_abstract_mesh(policy.mesh.abstract_mesh):
        run = phase._step.lower(policy.trained, phase._state, policy.frozen, part)
        run["score"] = learner._score.lower(policy.trained, policy.frozen, part)
    for name, lowered in run.items():
        assert lowered.as_text() == targets[name].lowered.as_text(), name


def test_a_sampler_s_weights_cache_and_state_are_described_as_they_are(model_dir):
    config, mesh = config_of(**CONFIG), single_device_mesh()
    described, real = (Programs(config, model_dir, mesh, described=described) for described in (True, False))
    for part in ("_weights", "_cache", "_state"):
        assert shapes(getattr(described, part)) == shapes(getattr(real, part))
    assert described.pages == real.pages
    names = described.lower().keys()
    real.warm_up()
    assert len(names) == real.compilations


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"libtpu is not installed .*rljax\[tpu\]"):
        topology.topology_devices("v5e:2x2")


@needs_libtpu
def test_a_topology_that_no_slice_has_is_named():
    with pytest.raises(UserError, match=r"--topology=v5e:3x3.*as in v5e:2x4"):
        topology.topology_devices("v5e:3x3")


@needs_libtpu
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:1x1", "v5e:2x4", "v5p:2x2x2", "v6e:1x1", "v6e:4x4", "tpu7x:2x2x1"])
def test_libtpu_knows_as_many_devices_as_the_plan_counts(name):
    assert len(topology.topology_devices(name)) == Topology.parse(name).devices


@needs_libtpu
@pytest.mark.parametrize(
    "name, kind",
    [
        ("v4:2x2x1", "TPU v4"),
        ("v5e:2x2", "TPU v5 lite"),
        ("v5p:2x2x1", "TPU v5"),
        ("v6e:2x2", "TPU v6 lite"),
        ("tpu7x:2x2x1", "TPU7x"),
    ],
)
def test_the_figures_of_a_chip_are_found_by_its_kind(name, kind, model_dir):
    devices = topology.topology_devices(name)
    assert devices[0].device_kind == kind
    chip = chip_of(kind)
    assert chip is not None and chip.kind == kind
    mesh = single_device_mesh(devices[0])
    spec = ModelSpec.from_directory(model_dir)
    assert remat_of(config_of(**CONFIG, **{"actor.gradient_checkpointing": "auto"}), spec, mesh) == "none"  # it fits by far


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("pool", [Pool("jax", data=4), Pool("jax", fsdp=2, tensor=2)], ids=str)
def test_the_learner_compiles_for_a_tpu_with_splash_attention_in_it(pool, model_dir):
    config = config_of(**CONFIG)
    targets = {t.name: t for t in topology.learner_targets(config, pool, model_dir, topology.topology_devices("v5e:2x2"))}
    found = {name: topology.compile_target(target) for name, target in targets.items()}
    assert {target.attention for target in targets.values()} == {"splash"}
    assert found["score"].kernels.keys() == {"splash_mha_fwd_segmented_no_residuals"}
    assert found["update"].kernels.keys() == found["accumulate"].kernels.keys() == SPLASH
    assert not found["apply"].kernels
    assert ("all-gather" in found["update"].collectives) == (pool.fsdp > 1)
    for program in found.values():
        assert program.arguments < program.peak < 1e9


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, architecture, pool",
    [
        ("v5e:2x2", "qwen3", Pool("jax", data=2, tensor=2)),
        ("v5p:2x2x1", "gemma3", Pool("jax", fsdp=2)),
        ("v6e:2x2", "llama", Pool("jax", tensor=2)),
        ("tpu7x:2x2x1", "qwen3", Pool("jax", data=2, fsdp=2)),
    ],
    ids=str,
)
def test_the_sampler_s_cache_stays_where_it_is_on_a_tpu(devices, architecture, pool, tmp_path):
    """Compiles every program: it has the kernels, makes nothing as large as a layer's cache, and needs little."""
    model = models.make_model(tmp_path, architecture=architecture)
    devices = topology.topology_devices(devices)
    names = set()
    for target in topology.sampler_targets(config_of(**LARGE_CACHE), pool, model, devices):
        found = topology.compile_target(target)
        assert target.attention == "pallas_tpu"
        names.add(target.name)
        assert found.kernels.keys() == (set() if target.name == "copy" else {"ragged_paged_attention_kernel", "write_pages"})
        assert hlo.large_operations(found.text, target.layer) == []
        assert found.temporaries < found.arguments / 10
        assert found.peak < 1.1 * found.arguments
    assert names == {"decode", "decode any", "copy", "prefill 1x32", "prefill 8x16", "prefill 1x128"}


@needs_libtpu
def test_a_missing_kernel_is_named():
    device = topology.topology_devices("v5e:2x2")[0]
    x = jax.ShapeDtypeStruct((8, 128), jax.numpy.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    with pytest.raises(UserError, match=r"twice: compiled without write_pages.*attention pallas_tpu"):
        topology.compile_target(topology.Target("twice", "pallas_tpu", jax.jit(lambda x: 2 * x).lower(x), ("write_pages",)))


@needs_libtpu
def test_a_program_that_a_device_has_no_memory_for_is_named():
    device = topology.topology_devices("v5e:2x2")[0]
    x = jax.ShapeDtypeStruct((1 << 17, 1 << 16), jax.numpy.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    with pytest.raises(topology.OutOfMemory, match=r"^twice: does not fit a device"):
        topology.compile_target(topology.Target("twice", "xla", jax.jit(lambda x: 2 * x).lower(x), ()))
