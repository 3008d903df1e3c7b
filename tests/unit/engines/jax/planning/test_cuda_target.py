"""GPUs that are not there: how XLA is told of them, and what is refused by name."""

import importlib.metadata

import pytest

from rljax.chips import CHIPS, GPU, Topology
from rljax.engines.jax.planning import hlo
from rljax.engines.jax.planning.cuda_target import GPUS, cuda_devices, target_config
from rljax.errors import UserError


def test_each_gpu_is_a_chip_whose_published_figures_are_in_its_target():
    chips = {chip.name: chip for chip in CHIPS}
    for name, gpu in GPUS.items():
        chip, text = chips[name], target_config(chips[name])
        assert chip.platform == GPU and chip.kind in text
        assert f"device_memory_size: {chip.memory}\n" in text and f"memory_bandwidth: {round(chip.bandwidth)}\n" in text
        # A multiprocessor's float32 units at two operations per cycle stay below the tensor cores' rate, and above 1/40 of it
        plain = 2 * gpu.multiprocessors * gpu.architecture.lanes * gpu.gigahertz * 1e9
        assert chip.flops / 40 < plain < chip.flops, name


def test_a_gpu_without_figures_and_a_plugin_that_is_missing_are_named(monkeypatch):
    with pytest.raises(UserError, match=r"^--topology: l40s:1 can't be compiled for \(GPUs: a100"):
        cuda_devices(Topology.parse("l40s:1"))
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    with pytest.raises(UserError, match=r"^--topology: h100:8 needs the CUDA plugin of jax, not a GPU .*rljax\[cuda\]"):
        cuda_devices(Topology.parse("h100:8"))


def test_kernels_of_a_gpu_s_program_are_counted_by_name():
    text = """
  %a = (bf16[2]{0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax", metadata={}
  %b = bf16[2]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={}
  %c = bf16[2]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", backend_config={i = "X", name = "paged_attention"}
  ROOT %d = bf16[2]{0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "paged_attention"}
  %e = bf16[2]{0} custom-call(%x), custom_call_target="__cublas$gemm"
"""
    assert hlo.kernels(text) == {"cudnn_fmhaSoftmax": 1, "cudnn_fmhaSoftmaxBackward": 1, "paged_attention": 2}
