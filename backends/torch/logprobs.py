"""Log-probs and entropy of labels from hidden states, in PyTorch, without [M, V] logits in memory.

The forward pass is cut along rows, `chunk` at a time: a row's log-sum-exp needs its whole
vocabulary. The backward pass is cut along the vocabulary, into blocks of as many elements: each
block of dL/d unembedding is then one matmul over all rows, summed in float32 inside it, and no [V,
H] accumulator is needed beside the gradient itself. Logits are computed twice (8 MHV operations in
all); `fused_objective` computes them once (6 MHV) for losses of single tokens.

With a process group, unembedding is this rank's shard of the vocabulary (equal shards, in rank
order) and hidden is whole on every rank; three [rows] reductions cross the group, never logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Settings of the op, and its reductions over ranks."""

    temperature: float = 1.0
    softcap: float | None = None
    chunk: int = 1024
    group: dist.ProcessGroup | None = None

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduces a tensor over the ranks that share the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(x, op, group=self.group)
        return x


def token_logprobs(
    hidden: Float[Tensor, "M H"],
    unembedding: Float[Tensor, "V H"],
    labels: Int[Tensor, " M"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 1024,
    group: dist.ProcessGroup | None = None,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    r"""Log-probability of each label, and entropy, under the softmax of tempered logits.

    .. math:: z = \mathrm{cap} \tanh(h W^T / \mathrm{cap}) / \tau,\quad
              \log p_y = z_y - \mathrm{lse}(z),\quad H = \mathrm{lse}(z) - \sum_j p_j z_j

    Differentiable in hidden and unembedding through both results: :math:`\partial \log p_y /
    \partial z_j = 1_{jy} - p_j`, :math:`\partial H / \partial z_j = -p_j (\log p_j + H)`.

    Args:
      hidden: [M, H], final hidden states, each predicting its label; float64, float32 or bfloat16.
      unembedding: [V, H], in the dtype of hidden.
      labels: [M] int, token ids in [0, V).
      temperature: that of sampling.
      softcap: Gemma's final logit soft-capping, None for none.
      chunk: rows; at most about chunk * V logits are held at once.
      group: ranks that hold a shard of the vocabulary each; None for a whole unembedding.

    Returns:
      logp [M] and entropy [M], nats, float32 (float64 for float64 inputs).
    """
    return _TokenLogprobs.apply(hidden, unembedding, labels, Scoring(temperature, softcap, chunk, group))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, unembedding: Tensor, labels: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        labels = local_labels(labels, unembedding, scoring)
        rows = [
            statistics(logits_of(hidden[part], unembedding), labels[part], scoring)
            for part in blocks(len(labels), scoring.chunk)
        ]
        logp, entropy, lse = (torch.cat(column) for column in zip(*rows, strict=True))
        ctx.save_for_backward(hidden, unembedding, labels, entropy, lse)
        ctx.scoring = scoring
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, d_logp: Tensor, d_entropy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, unembedding, labels, entropy, lse = ctx.saved_tensors
        rows, vocabulary = len(labels), len(unembedding)
        width = -(-max(ctx.scoring.chunk * vocabulary // max(rows, 1), 1) // 128) * 128
        d_hidden = torch.zeros_like(hidden, dtype=lse.dtype)
        d_unembedding = torch.empty_like(unembedding)
        for part in blocks(vocabulary, width):
            logits = logits_of(hidden, unembedding[part])
            slope = d_logits(logits, labels - part.start, entropy, lse, d_logp, d_entropy, ctx.scoring, hidden.dtype)
            torch.mm(slope.T, hidden, out=d_unembedding[part])
            d_hidden += matmul(slope, unembedding[part])
        return ctx.scoring.all_reduce(d_hidden).to(hidden.dtype), d_unembedding, None, None


def blocks(length: int, width: int) -> Iterator[slice]:
    """Yields slices of `width` from 0 to `length`, the last one shorter; an empty one for length 0."""
    for start in range(0, max(length, 1), width):
        yield slice(start, min(start + width, length))


def local_labels(labels: Tensor, unembedding: Tensor, scoring: Scoring) -> Tensor:
    """Counts labels from the first row of this rank's shard of the unembedding."""
    return labels if scoring.group is None else labels - dist.get_rank(scoring.group) * len(unembedding)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in float32 or wider, without rounding the sum to half precision."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def logits_of(hidden: Tensor, unembedding: Tensor) -> Tensor:
    """Returns hidden @ unembedding.T, [C, V], in float32 or wider.

    Soft cap and temperature are applied by the functions that read it.
    """
    return matmul(hidden, unembedding.T)


def statistics(raw: Tensor, labels: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logp, entropy and log-sum-exp, each [C], of rows of raw logits.

    The logits may be a shard of the vocabulary.
    """
    if scoring.group is None:
        return elementwise(_statistics, raw)(raw, labels, scoring.temperature, scoring.softcap)
    peak = scoring.all_reduce(tempered(raw, scoring.temperature, scoring.softcap)[0].amax(-1), dist.ReduceOp.MAX)
    sums = scoring.all_reduce(torch.stack(elementwise(_sums, raw)(raw, labels, peak, scoring.temperature, scoring.softcap)))
    return _from_sums(peak, *sums)


def d_logits(
    raw: Tensor,
    labels: Tensor,
    entropy: Tensor,
    lse: Tensor,
    d_logp: Tensor,
    d_entropy: Tensor,
    scoring: Scoring,
    dtype: torch.dtype,
) -> Tensor:
    """Returns dL/d(hidden @ unembedding.T), [C, V], in dtype.

    Labels count from the first column; those in other shards are out of range.
    """
    rows = (entropy, lse, d_logp, d_entropy)
    return elementwise(_d_logits, raw)(raw, labels, *rows, scoring.temperature, scoring.softcap, dtype)


def tempered(raw: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns soft-capped logits / temperature, and tanh(raw / softcap) if there is a cap."""
    if softcap is None:
        return raw / temperature, None
    squashed = torch.tanh(raw / softcap)
    return squashed * (softcap / temperature), squashed


def _statistics(raw: Tensor, labels: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    peak = tempered(raw, temperature, softcap)[0].amax(-1)
    return _from_sums(peak, *_sums(raw, labels, peak, temperature, softcap))


def _sums(
    raw: Tensor, labels: Tensor, peak: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums exp(z - peak) and (z - peak) exp(z - peak) over this shard; also z - peak at the label."""
    shifted = tempered(raw, temperature, softcap)[0] - peak[:, None]
    weights = torch.exp(shifted)
    hit = labels[:, None] == torch.arange(raw.shape[1], device=raw.device)
    return weights.sum(-1), (weights * shifted).sum(-1), torch.where(hit, shifted, 0.0).sum(-1)


def _from_sums(peak: Tensor, total: Tensor, moment: Tensor, at_label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    log_total = torch.log(total)
    return at_label - log_total, log_total - moment / total, peak + log_total


def _d_logits(
    raw: Tensor,
    labels: Tensor,
    entropy: Tensor,
    lse: Tensor,
    d_logp: Tensor,
    d_entropy: Tensor,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    logits, squashed = tempered(raw, temperature, softcap)
    log_p = logits - lse[:, None]
    hit = labels[:, None] == torch.arange(raw.shape[1], device=raw.device)
    through_p = torch.exp(log_p) * (d_logp[:, None] + d_entropy[:, None] * (log_p + entropy[:, None]))
    slope = torch.where(hit, d_logp[:, None], 0.0) - through_p
    if squashed is not None:
        slope = slope * (1 - squashed**2)
    return (slope / temperature).to(dtype)


def elementwise(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """Compiles the function for arrays on a GPU, so that it takes few passes over memory.

    Returns it as it is for arrays elsewhere.
    """
    return _compiled(function) if like.is_cuda else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
