"""FLOPs against a count by hand, and the memory estimate's monotony."""

import dataclasses

import numpy as np
import pytest

from rljax.config.schema import ModelConfig
from rljax.hf import spec_of
from rljax.hf.activations import checkpointing, training_bytes
from rljax.hf.flops import update_flops

H, F, L, N, K, D, V = 8, 12, 2, 4, 2, 3, 50
SPEC = spec_of(ModelConfig("llama", H, F, L, N, K, D, 64, True, 0.02, "char"), vocab_size=V)


def by_hand(lengths, trained, window=None):
    """Every multiplication of a forward pass one by one: 2 FLOPs each, and twice as many backward."""
    forward = 0
    for n in lengths:
        for t in range(n):
            queries_keys_values = H * N * D + 2 * H * K * D
            output = N * D * H
            feed = 3 * H * F
            seen = min(t + 1, window or t + 1)
            attention = 2 * N * D * seen  # with the keys, with the values
            forward += 2 * L * (queries_keys_values + output + feed + attention)
    return 3 * (forward + 2 * trained * H * V)


@pytest.mark.parametrize("window", [None, 3])
def test_as_counted_by_hand(window):
    spec = dataclasses.replace(SPEC, windows=(window,) * L)
    ids = np.array([[1, 1, 1, 1, 1, 2, 0, 0], [1, 1, 2, 2, 2, 2, 3, 0]], np.int32)
    assert update_flops(spec, ids, 6) == by_hand((5, 1, 2, 4, 1), 6, window)


def test_packing_changes_nothing():
    apart = np.array([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]], np.int32)
    assert update_flops(SPEC, apart, 3) == update_flops(SPEC, np.array([[1, 1, 1, 2, 2, 0]], np.int32), 3)


def test_a_frozen_matrix_has_no_gradient():
    ids = np.ones((1, 1), np.int32)
    attention = 3 * 4 * L * N * D
    whole, frozen = update_flops(SPEC, ids, 0), update_flops(SPEC, ids, 0, adapters=True)
    assert (frozen - attention) / (whole - attention) == pytest.approx(2 / 3)


def test_activations_are_kept_where_they_fit():
    needed = training_bytes(SPEC, 100, 10, 1)
    assert checkpointing("auto", needed, int(2 * needed) + 2) == "none"
    assert checkpointing("auto", needed, int(2 * needed) - 2) == "full"
    assert checkpointing("auto", needed, None) == "full"
    assert checkpointing("dots", needed, None) == "dots"
    assert training_bytes(SPEC, 200, 10, 1) > needed > training_bytes(SPEC, 100, 10, 2)
