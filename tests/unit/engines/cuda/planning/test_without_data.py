"""The learner's update on tensors without data: what it holds is what a real one holds."""

import dataclasses
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from rljax.backends.torch import mesh
from rljax.backends.torch.context_parallel import Context
from rljax.config import io
from rljax.config.allocation import Pool, parse
from rljax.engine import find_plugin
from rljax.engines.cuda.config import WORKSPACE_BYTES
from rljax.engines.cuda.learning.rows import micro_batches
from rljax.engines.cuda.planning.compiled_layers import compiler
from rljax.engines.cuda.planning.tensor_memory import TensorMemory
from rljax.engines.cuda.planning.without_data import _full_batch, components, programs, update_memory
from rljax.errors import UserError
from rljax.experiments.bench.packed_rows import PackedRows
from rljax.experiments.bench.plan_cases import learner
from rljax.experiments.bench.plan_no_gpu import heads_repeated
from rljax.experiments.bench.shapes import write_config
from rljax.hf.companion_files import write_companions
from rljax.hf.shapes import shape_of
from rljax.hf.tensors import parameter_count

MIB = 1 << 20


@pytest.fixture(autouse=True)
def without_a_group():
    """Ends the group that learners of other tests left to this process: a plan makes one of its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
        mesh.forget()


def test_memory_is_that_of_the_storages_that_live():
    with FakeTensorMode(), TensorMemory().counting() as memory:
        kept = torch.zeros(MIB)
        view = kept.view(2, -1).T
        assert memory.now == 4 * MIB
        double = kept + view.reshape(-1)
        assert memory.now == 8 * MIB and memory.peak == 12 * MIB  # a copy for the reshape, until the sum is made
        del double
        gc.collect()
        kept.untyped_storage().resize_(0)
        one = torch.zeros(1)
        assert float(one) == 1.0
    assert memory.peak == 12 * MIB
    assert sum(memory.at_peak.values()) == memory.peak


def test_of_a_fused_function_only_the_result_counts():
    with FakeTensorMode(), TensorMemory().counting() as memory:
        x = torch.zeros(MIB)
        y = memory.fused(lambda a: (a.exp() * 2 + a).sin())(x)
        assert memory.now == memory.peak == 8 * MIB and y.shape == x.shape


def test_tensors_on_the_meta_device_take_nothing():
    with FakeTensorMode(), TensorMemory().counting() as memory:
        torch.nn.Linear(1024, 1024, device="meta")
        assert memory.peak == 0
        torch.nn.Linear(1024, 1024, bias=False)
    assert memory.peak == 4 * MIB


def test_a_compiled_function_holds_neither_its_inputs_nor_its_results():
    with FakeTensorMode(allow_non_fake_inputs=True), TensorMemory().counting() as memory:
        weight = torch.zeros(1024, 1024, requires_grad=True)
        function = compiler(memory)(lambda x: (x @ weight).sin() @ weight)
        for _ in range(2):
            x = torch.zeros(1024, 1024, requires_grad=True)
            function(x).sum().backward()
            weight.grad = x = None
            gc.collect()
            assert memory.now == 4 * MIB


def test_tensor_parallelism_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^--compile: fsdp:t2: the update of fsdp can't be run without data where t"):
        next(programs(io.load("base", []), Pool("fsdp", tensor=2), Path("none")))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_batch_fills_the_rows_that_each_rank_scores(rows):
    config = io.load("base", [("actor.mb_spec.rows_per_mb", str(rows))])
    batch = _full_batch(config, Pool("fsdp", data=3, context=2))
    last = SimpleNamespace(context=Context(1, 2), data_shard=(0, 3), device=torch.device("cpu"))
    (cut,) = micro_batches(batch, batch.loss_mask, last, shape_of("tiny"), rows)
    assert cut.tokens.mask.any(dim=1).all()


PLANNED = {  # dims, keys
    "one rank": ("d1", {}),
    "shards": ("f2", {"actor.gradient_checkpointing": "none"}),
    "context parallelism": ("c2", {}),
    "context parallelism, all kept": ("c4", {"actor.gradient_checkpointing": "none"}),
    "adapters": ("d1", {"actor.lora.rank": 4}),
    "a ratio of sequences": ("f2", {"actor.importance_sampling_level": "sequence"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANNED)
def test_an_update_takes_what_is_planned_for_it(case, tmp_path):
    dims, keys = PLANNED[case]
    keys = {"actor.logprob_chunk": 512} | keys
    made = learner("smollm2-135m", f"fsdp:{dims}", PackedRows(rows=4, tokens=2048, segments=1), rows_per_mb=1)
    made = dataclasses.replace(made, keys=made.keys | keys)
    config = made.plan("h200:4").request.config
    batch = made.rows.batch(write_config(tmp_path, made.shape).vocab_size)
    with heads_repeated():
        memory = update_memory(config, parse(made.mode, find_plugin).learner, tmp_path, batch)
    assert made.planned("h200:4") == pytest.approx(memory.peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "shards"), [(Pool("fsdp"), 1), (Pool("fsdp", fsdp=4), 4)], ids=str)
def test_an_update_holds_twelve_bytes_per_parameter_and_its_peak_grows_with_the_row(pool, shards, tmp_path):
    spec = shape_of("tiny")
    write_companions(tmp_path, spec, "bfloat16", None)
    peaks = []
    for tokens in (256, 4096):
        settings = [("allocation_mode", str(pool)), ("rollout.addr", "host:1"), ("fsdp.compile", "false")]
        config = io.load(
            "base", [*settings, ("actor.mb_spec.max_tokens_per_row", str(tokens)), ("gconfig.max_new_tokens", "64")]
        )
        memory = update_memory(config, pool, tmp_path)
        found = components(memory.at_peak)
        assert sum(found.values()) == memory.peak
        assert found["Adam moments"] == pytest.approx(8 * parameter_count(spec) / shards, rel=0.1)  # blocks of 512 bytes
        peaks.append(memory.peak - WORKSPACE_BYTES)
    assert peaks[1] > 2 * peaks[0]
