"""Sums loss, metrics and gradients of a minibatch over its micro-batches and over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rljax.backends.torch.mesh import MAX, MIN, RankMesh
from rljax.backends.torch.optim import StepStats
from rljax.metrics.mean import Mean
from rljax.objective.spec import MeanArrays

Metrics = dict[str, MeanArrays]
Loss = Callable[[Any], tuple[Tensor, Metrics]]  # rows -> (summed loss, metrics)


def add_gradients(
    loss: Loss, parts: Iterable[Any], before: Callable[[bool], None] = lambda last: None
) -> tuple[Tensor, Metrics]:
    """Runs forward and backward over the micro-batches; gradients add up in the parameters.

    The loss of a micro-batch is its share of the minibatch's: a sum whose weights include the
    normalizer. So neither gradients nor metrics depend on how rows are split.

    Args:
      before: called before each micro-batch, with whether it is the last one.
    """
    total: Tensor | None = None
    metrics: Metrics = {}
    ahead = iter(parts)
    following = next(ahead, None)
    while following is not None:
        rows, following = following, next(ahead, None)
        before(following is None)
        part, found = loss(rows)
        part.backward()
        total = part.detach() if total is None else total + part.detach()
        metrics = {name: _merge(metrics[name], mean) if name in metrics else mean for name, mean in found.items()}
    assert total is not None  # there is at least one micro-batch, perhaps an empty one
    return total, metrics


def _merge(a: MeanArrays, b: MeanArrays) -> MeanArrays:
    return MeanArrays(a.sum + b.sum, a.count + b.count, torch.minimum(a.min, b.min), torch.maximum(a.max, b.max))


def merge_ranks(loss: Tensor, metrics: Metrics, rank_mesh: RankMesh) -> tuple[float, dict[str, Mean]]:
    """Merges loss and metrics of all ranks, on every rank. A collective.

    Args:
      loss, metrics: those of this rank; ranks that repeat another's results don't count.
    """
    means = list(metrics.values())
    columns = [
        torch.stack([torch.as_tensor(value, device=rank_mesh.device).double().reshape(()) for value in column])
        for column in (
            [loss, *(m.sum for m in means), *(m.count for m in means)],
            [m.min for m in means],
            [m.max for m in means],
        )
    ]
    sums, low, high = columns if rank_mesh.is_primary else (torch.zeros_like(columns[0]), *columns[1:])
    rank_mesh.reduce(sums), rank_mesh.reduce(low, MIN), rank_mesh.reduce(high, MAX)
    (total, *sums_and_counts), lows, highs = sums.tolist(), low.tolist(), high.tolist()
    parts = zip(sums_and_counts[: len(means)], sums_and_counts[len(means) :], lows, highs, strict=True)
    return total, {name: Mean(*part) for name, part in zip(metrics, parts, strict=True)}


def to_means(loss: float, metrics: dict[str, Mean], stats: StepStats, prefix: str) -> dict[str, Mean]:
    """Returns the metrics of a step, with those of the optimizer under `prefix`.

    A skipped step has no grad_norm and no loss, for they are not finite.
    """

    def scalar(value: float) -> Mean:
        return Mean(0.0, 0) if stats.skipped else Mean(value, 1)

    if stats.out_of_bounds is not None:
        metrics = metrics | {f"{prefix}/out_of_bounds": Mean(float(stats.out_of_bounds), 1)}
    if stats.rounded_away is not None:
        metrics = metrics | {f"{prefix}/rounded_away": stats.rounded_away}
    return metrics | {
        f"{prefix}/loss": scalar(loss),
        f"{prefix}/grad_norm": scalar(stats.grad_norm),
        f"{prefix}/lr": Mean(stats.lr, 1),
        f"{prefix}/optimizer_steps": Mean(stats.steps, 1),
        f"{prefix}/skipped": Mean(float(stats.skipped), 1),
    }
