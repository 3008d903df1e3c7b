import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.batching.batch import Batch
from rljax.batching.compaction import BUCKETS, bucket, compact, kept
from rljax.objective import oracle
from rljax.objective.spec import Objective, TokenArrays


def batch_of(seed: int, rows: int = 3, length: int = 40) -> Batch:
    """Packed rows of three or four trajectories and some padding.

    Tokens here and there, and one trajectory of each row, have advantage 0.
    """
    random = np.random.default_rng(seed)
    segment_ids = np.zeros((rows, length), np.int32)
    loss_mask = np.zeros((rows, length), bool)
    advantage = np.zeros((rows, length), np.float32)
    for row in range(rows):
        start = 0
        for segment in range(1, random.integers(4, 6)):
            end = min(start + random.integers(4, 12), length)
            segment_ids[row, start:end] = segment
            loss_mask[row, start + 2 : end] = random.random(max(end - start - 2, 0)) < 0.8
            advantage[row, start:end] = random.normal(size=end - start) * (random.random(end - start) < 0.7) * (segment != 2)
            start = end

    def floats():
        return random.normal(-1, 0.3, (rows, length)).astype(np.float32)

    return Batch(
        token_ids=random.integers(0, 99, (rows, length)).astype(np.int32),
        segment_ids=segment_ids,
        positions=np.zeros((rows, length), np.int32),
        loss_mask=loss_mask,
        loss_weight=np.where(loss_mask, random.random((rows, length)), 0).astype(np.float32),
        behavior_logp=floats(),
        versions=random.integers(0, 5, (rows, length)).astype(np.int32),
        advantage=advantage,
        proximal_logp=floats(),
        reference_logp=floats(),
    )


OBJECTIVES = [
    Objective(weight_cap=2.0),
    Objective(kl_coef=0.1, entropy_coef=0.1),
    Objective(ratio_level="sequence", clip_low=0.01, clip_high=0.01),
    Objective(cap_level="sequence", weight_cap=1.5),
    Objective(loss="cispo"),
    Objective(loss="sft"),
]


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 1000), st.sampled_from(OBJECTIVES))
def test_the_objective_of_the_kept_tokens_is_that_of_the_batch(seed, objective):
    """Loss and gradient of the compacted batch, put back where they came from, are those of the
    whole.
    """
    batch = batch_of(seed)
    random = np.random.default_rng(seed + 1)
    logp, entropy = random.normal(-1, 0.3, (2, *batch.shape))
    names = ("advantage", "behavior_logp", "segment_ids", "proximal_logp", "reference_logp")
    tokens = TokenArrays(batch.loss_weight, batch.loss_mask, **{name: getattr(batch, name) for name in names})
    whole = oracle.policy_objective(logp, entropy, tokens, objective)

    small = compact(batch, kept(batch))
    rows = np.arange(len(logp))[:, None]
    part = oracle.policy_objective(logp[rows, small.source + 1], entropy[rows, small.source + 1], small.tokens, objective)
    np.testing.assert_allclose(small.scatter(part.d_logp), whole.d_logp, atol=1e-12)
    np.testing.assert_allclose(small.scatter(part.d_entropy), whole.d_entropy, atol=1e-12)
    assert small.tokens.segment_ids.max() <= small.labels.shape[1]
    assert (small.labels[small.tokens.mask] == batch.token_ids[kept(batch)]).all()


def test_prompts_and_padding_are_left_out():
    batch = batch_of(1)
    assert (kept(batch) == batch.loss_mask).all() and batch.loss_mask.sum() < np.count_nonzero(batch.segment_ids)
    unweighted = batch.replace(loss_weight=np.zeros_like(batch.loss_weight))
    assert not kept(unweighted).any()


def test_a_score_pass_puts_every_trained_token_back():
    batch = batch_of(2)
    small = compact(batch, batch.loss_mask)
    assert (small.scatter(small.tokens.behavior_logp) == np.where(batch.loss_mask, batch.behavior_logp, 0)).all()


def test_nothing_to_train_is_a_bucket_of_padding():
    batch = batch_of(3)
    small = compact(batch.replace(advantage=np.zeros_like(batch.advantage)), np.zeros(batch.shape, bool))
    assert not small.tokens.mask.any() and small.labels.shape[1] >= 1


@given(st.integers(0, 4096), st.integers(1, 4096))
def test_buckets_are_few_and_hold_what_they_must(count, length):
    count = min(count, length)
    assert count <= bucket(count, length) <= length
    assert len({bucket(c, length) for c in range(0, length + 1, max(length // 64, 1))}) <= BUCKETS


def test_ranks_may_agree_on_a_width_and_a_row_must_fit_it():
    batch = batch_of(4)
    assert compact(batch, batch.loss_mask, width=40).labels.shape == batch.shape
    with pytest.raises(ValueError, match="the width is 1"):
        compact(batch, batch.loss_mask, width=1)
    broken = dataclasses.replace(batch, loss_mask=np.ones(batch.shape, bool))
    with pytest.raises(ValueError, match="token 0"):
        compact(broken, broken.loss_mask)
