import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.config.keys import walk
from rljax.config.schema import ActorConfig
from rljax.objective.aggregation import loss_weights

(AGGREGATIONS,) = [leaf.key.choices for leaf in walk(ActorConfig()) if leaf.path == "loss_aggregation"]

lengths = st.lists(st.sampled_from([0, 0, 1, 3, 17, 250, 900]), min_size=1, max_size=12)


def masks_of(counts):
    return [np.arange(count + 3) >= 3 for count in counts]


@settings(deadline=None, derandomize=True)
@given(lengths)
def test_each_aggregation_is_its_formula(counts):
    losses = [np.random.default_rng(i).normal(size=count + 3) for i, count in enumerate(counts)]
    masks = masks_of(counts)
    kept = [loss[mask] for loss, mask in zip(losses, masks, strict=True) if mask.any()]
    if not kept:
        kept = [np.zeros(1)]
    expected = {
        "token-mean": np.concatenate(kept).mean(),
        "seq-mean-token-mean": np.mean([x.mean() for x in kept]),
        "seq-mean-token-sum": np.mean([x.sum() / 512 for x in kept]),
    }
    for aggregation in AGGREGATIONS:
        weights = loss_weights(masks, aggregation, 512)
        total = sum(float(np.sum(w.astype(np.float64) * loss)) for w, loss in zip(weights, losses, strict=True))
        np.testing.assert_allclose(total, expected[aggregation], rtol=1e-5, atol=1e-6)
        assert all(w.dtype == np.float32 and not w[~mask].any() for w, mask in zip(weights, masks, strict=True))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_to_train_is_not_divided_by(aggregation):
    weights = loss_weights(masks_of([0, 0]), aggregation, 16)
    assert all(np.isfinite(w).all() and not w.any() for w in weights)
    assert loss_weights([], aggregation, 16) == []


def test_mean_of_means_is_another_loss():
    """12 rows of 3 to 900 tokens: weights of the whole batch add up to its loss; those of its
    parts, averaged, do not.
    """
    counts = [3, 900, 17, 250, 4, 610, 88, 5, 333, 29, 741, 12]
    losses = [np.random.default_rng(i).normal(1, 1, count + 3) for i, count in enumerate(counts)]
    masks = masks_of(counts)

    def loss(chosen, weights):
        return sum(float(np.sum(weights[j].astype(np.float64) * losses[i])) for j, i in enumerate(chosen))

    whole = loss(range(12), loss_weights(masks, "token-mean"))
    weights = loss_weights(masks, "token-mean")
    for n in (2, 3, 5):
        parts = np.array_split(np.arange(12), n)
        summed = sum(loss(part, [weights[i] for i in part]) for part in parts)
        np.testing.assert_allclose(summed, whole, rtol=1e-12)
        averaged = np.mean([loss(part, loss_weights([masks[i] for i in part], "token-mean")) for part in parts])
        assert abs(averaged - whole) > 1e-3


def test_a_sum_needs_its_constant():
    with pytest.raises(ValueError, match="seq-mean-token-sum"):
        loss_weights([], "seq-mean-token-sum")
