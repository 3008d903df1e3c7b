"""The learner's update on tensors without data: what it holds is what a real one holds."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rljax.config import io
from rljax.config.allocation import Pool
from rljax.engines.cuda.tensor_memory import TensorMemory
from rljax.hf.companion_files import write_companions
from rljax.hf.shapes import shape_of
from rljax.hf.tensors import parameter_count

MIB = 1 << 20


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


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "shards"), [(Pool("fsdp"), 1), (Pool("fsdp", fsdp=4), 4)], ids=str)
def test_an_update_holds_twelve_bytes_per_parameter_and_its_peak_grows_with_the_row(pool, shards, tmp_path):
    from rljax.engines.cuda.without_data import components, update_memory

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
        peaks.append(memory.peak)
    assert peaks[1] > 2 * peaks[0]
