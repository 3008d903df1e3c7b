"""The PyTorch learner on a CUDA device: FlashAttention in bfloat16, memory, and a publish that
holds one tensor at a time.

pytest -m gpu tests/gpu
"""

import numpy as np
import pytest
import torch

from rljax.backends.torch import attention
from rljax.config.allocation import Pool
from rljax.engine import ExportToSampler
from rljax.engines.cuda.learning.learner import TorchLearner
from rljax.testing import models
from rljax.testing.learner_batches import config_of, episodes, first_fit, pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDE = dict(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, num_layers=4)
BFLOAT16 = {"actor.dtype": "bfloat16"}
MILD = {"actor.optimizer.eps": 1e-2}  # else the first step of Adam is the sign of the gradient, noise included


def make(model_dir, **settings):
    return TorchLearner(config_of(**settings), Pool("fsdp"), model_dir)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def model_dir(request, tmp_path_factory):
    """gemma3 has sliding windows of a quarter of 64 positions, shorter than the segments."""
    positions = {"max_position_embeddings": 64} if request.param == "gemma3" else {}
    return models.make_model(tmp_path_factory.mktemp("model"), architecture=request.param, **WIDE, **positions)


@pytest.fixture(scope="module")
def batch():
    items = episodes(24, longest=60)
    return pack(items, first_fit(items, 128), 128)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_flash_attention_in_bfloat16_is_as_near_to_float32_as_the_masked_kind(model_dir, batch, monkeypatch):
    exact = make(model_dir, **MILD)
    want = exact.score(batch)
    exact.update(batch)
    gradient = exact.named_state()["mu"]
    exact.close()
    calls = []
    flash = attention._flash
    monkeypatch.setattr(attention, "_flash", lambda *args: calls.append(1) or flash(*args))
    errors = {}
    for kind in ("flash", "masked"):
        monkeypatch.setattr(attention, "HALF", (torch.bfloat16,) if kind == "flash" else ())
        learner = make(model_dir, **MILD, **BFLOAT16)
        score = learner.score(batch)
        learner.update(batch)
        found = learner.named_state()["mu"]
        errors[kind] = [distance(score, want)] + [distance(found[name], gradient[name]) for name in gradient]
        learner.close()
    assert calls
    assert errors["flash"][0] < 0.01
    assert max(errors["flash"]) < 0.1
    assert np.mean(errors["flash"]) < 1.5 * np.mean(errors["masked"])


def test_packed_rows_change_bfloat16_log_probs_by_rounding_alone(model_dir):
    items = episodes(16, longest=60)
    learner = make(model_dir, **BFLOAT16)
    alone = learner.score(pack(items, [[i] for i in range(16)], 64))
    rows = first_fit(items, 128)
    packed = learner.score(pack(items, rows, 128))
    for row, members in enumerate(rows):
        at = 0
        for index in members:
            length = len(items[index])
            np.testing.assert_allclose(packed[row, at : at + length], alone[index, :length], atol=0.05)
            at += length
    learner.close()


def test_memory_is_masters_moments_gradients_and_a_layer_and_a_publish_adds_a_tensor(tmp_path):
    shape = dict(hidden_size=1024, intermediate_size=4096, num_heads=8, num_kv_heads=4, head_dim=128, num_layers=12)
    model_dir = models.make_model(tmp_path, **shape)
    items = episodes(8)
    batch = pack(items, first_fit(items, 64), 64)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    settings = {"actor.gradient_checkpointing": "full", "allocation_mode": "sglang:d1|fsdp:d1"}
    learner = make(model_dir, **BFLOAT16, **settings)
    parameters = sum(p.numel() for p in learner._policy.trained.values())
    torch.cuda.reset_peak_memory_stats()
    learner.update(batch)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert held < 12 * parameters * 1.02 + 2**26  # float32 masters and two moments
    assert peak < 16 * parameters * 1.1 + 2**27  # and gradients; a layer's weights and activations are little beside them
    largest = max(p.numel() for p in learner._policy.trained.values())
    torch.cuda.reset_peak_memory_stats()
    for _, tensor in learner.export(ExportToSampler("ipc", Pool("sglang"))).sender.tensors:
        assert tensor.dtype == torch.bfloat16
        del tensor
    assert torch.cuda.max_memory_allocated() - before - held < 4 * 2 * largest + 2**22
    learner.close()
