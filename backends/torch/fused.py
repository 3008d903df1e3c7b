"""The policy objective from hidden states; its gradient is computed while the logits are there.

What a token's loss needs beside its own logp and entropy (proximal and behavior log-probs,
advantage, normalizer) is known before the unembedding runs. So a chunk of logits goes through
objective, softmax gradient and both gradient matmuls at once and is never recomputed: 6 MHV
operations, where recomputing takes 8. This works only if a token's loss depends on that token alone
(`Objective.by_token`).

Tokens without a gradient, as those of advantage 0, are there for the metrics alone. Rows that may
have a gradient are sorted to the front, and the others take the first matmul only: 2 MHV.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rljax.backends.torch.logprobs import Scoring, blocks, d_logits, elementwise, local_labels, logits_of, matmul, statistics
from rljax.backends.torch.objective import policy_objective
from rljax.batching.compaction import bucket
from rljax.objective.spec import MeanArrays, Objective, TokenArrays


def fused_objective(
    hidden: Float[Tensor, "M H"],
    unembedding: Float[Tensor, "V H"],
    labels: Int[Tensor, " M"],
    tokens: TokenArrays,
    objective: Objective,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 1024,
    accumulator: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    with_advantage: int | None = None,
) -> tuple[Float[Tensor, ""], dict[str, MeanArrays]]:
    """Computes `policy_objective` of `token_logprobs`, with the same loss, metrics and gradients.

    Gradients are computed in the forward pass if they are needed. The backward pass scales them by
    the gradient of the loss, once: a second backward raises. Metrics have no gradient.

    Args:
      hidden, unembedding: [M, H] and [V, H], in one dtype; gradients flow to both.
      labels: [M] int, token ids in [0, V).
      tokens: arrays of [M], or of [R, m] with R * m = M in the order of hidden.
      objective: one whose `by_token` is true; others raise ValueError.
      chunk: rows per chunk; chunk * V logits are in memory at once.
      accumulator: dtype in which dL/d unembedding is summed over chunks; None for that of
        unembedding. float32 beside bfloat16 costs 4 V H bytes more and rounds once instead of once
        per chunk.
      group: ranks that have one shard of the vocabulary each; None for a whole unembedding.
      with_advantage: how many tokens of the mask have an advantage that is not 0; None to count
        them, for which the host waits for the device.

    Returns:
      Loss, and metrics by name.
    """
    if not objective.by_token:
        raise ValueError(
            "a sequence-level objective cannot be cut into chunks of rows; use token_logprobs and policy_objective"
        )
    flat = TokenArrays(*(x if x is None else x.reshape(-1) for x in tokens))
    scoring = Scoring(temperature, softcap, chunk, group)
    wants = torch.is_grad_enabled() and (hidden.requires_grad or unembedding.requires_grad)
    with torch.no_grad():
        if not wants:
            return _loss_alone(hidden, unembedding, labels, flat, objective, scoring)
        moved = len(labels)
        if objective.by_advantage:
            moved = int(objective.moved_by(flat).sum()) if with_advantage is None else with_advantage
            moved = bucket(moved, len(labels))  # few shapes to compile
        loss, metrics, grads = _loss_and_grads(hidden, unembedding, labels, flat, objective, scoring, accumulator, moved)
    return _Attach.apply(hidden, unembedding, loss, grads), metrics


class _Attach(torch.autograd.Function):
    """Gives a loss the gradients that were computed with it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, unembedding: Tensor, loss: Tensor, grads: list[Tensor]) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.grads:
            raise RuntimeError("fused_objective: its gradients were used up by the first backward")
        d_unembedding, d_hidden = (
            ctx.grads.pop(),
            ctx.grads.pop(),
        )  # no other reference is left, so .grad takes them without a copy
        return d_hidden.mul_(d_loss), d_unembedding.mul_(d_loss), None, None


def _loss_and_grads(
    hidden: Tensor,
    unembedding: Tensor,
    labels: Tensor,
    tokens: TokenArrays,
    objective: Objective,
    scoring: Scoring,
    accumulator: torch.dtype | None,
    moved: int,
) -> tuple[Tensor, dict[str, MeanArrays], list[Tensor]]:
    """Computes loss, metrics and [d_hidden, d_unembedding], one chunk of rows at a time.

    Args:
      moved: rows that may have a gradient; with fewer than all, those of `objective.moved_by`.
    """
    if moved == len(labels):
        return _in_order(hidden, unembedding, labels, tokens, objective, scoring, accumulator)
    order = torch.argsort(objective.moved_by(tokens).logical_not(), stable=True)

    def rows(part: slice) -> tuple[Tensor, Tensor, TokenArrays]:
        return hidden[order[part]], labels[order[part]], TokenArrays(*(x if x is None else x[order[part]] for x in tokens))

    first, rest = rows(slice(moved)), rows(slice(moved, None))
    loss, metrics, (d_first, d_unembedding) = _in_order(first[0], unembedding, *first[1:], objective, scoring, accumulator)
    loss_of_rest, metrics_of_rest = _loss_alone(rest[0], unembedding, *rest[1:], objective, scoring)
    d_hidden = torch.zeros_like(hidden).index_copy_(0, order[:moved], d_first)
    return loss + loss_of_rest, _merged([metrics, metrics_of_rest]), [d_hidden, d_unembedding]


def _in_order(
    hidden: Tensor,
    unembedding: Tensor,
    labels: Tensor,
    tokens: TokenArrays,
    objective: Objective,
    scoring: Scoring,
    accumulator: torch.dtype | None,
) -> tuple[Tensor, dict[str, MeanArrays], list[Tensor]]:
    """`_loss_and_grads` of rows that all take every matmul."""
    labels = local_labels(labels, unembedding, scoring)
    d_hidden = torch.empty_like(hidden)
    d_unembedding = torch.zeros_like(unembedding, dtype=accumulator or unembedding.dtype)
    parts = []
    for part in blocks(len(labels), scoring.chunk):
        logits = logits_of(hidden[part], unembedding)
        logp, entropy, lse = statistics(logits, labels[part], scoring)
        loss, metrics, d_logp, d_entropy = _slopes(logp, entropy, _row(tokens, part), objective)
        parts.append((loss, metrics))
        slope = d_logits(logits, labels[part], entropy, lse, d_logp, d_entropy, scoring, hidden.dtype)
        del logits
        if scoring.group is None:
            torch.mm(slope, unembedding, out=d_hidden[part])
        else:
            d_hidden[part] = scoring.all_reduce(matmul(slope, unembedding))
        if d_unembedding.dtype == slope.dtype:
            d_unembedding.addmm_(slope.T, hidden[part])
        else:
            d_unembedding += matmul(slope.T, hidden[part])
    return *_summed(parts), [d_hidden, d_unembedding.to(unembedding.dtype)]


def _loss_alone(
    hidden: Tensor, unembedding: Tensor, labels: Tensor, tokens: TokenArrays, objective: Objective, scoring: Scoring
) -> tuple[Tensor, dict[str, MeanArrays]]:
    """Computes loss and metrics, one chunk of rows at a time."""
    labels = local_labels(labels, unembedding, scoring)
    compute = elementwise(policy_objective, hidden)
    parts = []
    for part in blocks(len(labels), scoring.chunk):
        logp, entropy, _ = statistics(logits_of(hidden[part], unembedding), labels[part], scoring)
        parts.append(compute(logp[None], entropy[None], _row(tokens, part), objective))
    return _summed(parts)


def _row(tokens: TokenArrays, part: slice) -> TokenArrays:
    return TokenArrays(*(x if x is None else x[None, part] for x in tokens))


def _summed(parts: list[tuple[Tensor, dict[str, MeanArrays]]]) -> tuple[Tensor, dict[str, MeanArrays]]:
    return torch.stack([loss for loss, _ in parts]).sum(), _merged([metrics for _, metrics in parts])


def _slopes(
    logp: Tensor, entropy: Tensor, row: TokenArrays, objective: Objective
) -> tuple[Tensor, dict[str, MeanArrays], Tensor, Tensor]:
    """Computes loss and metrics of a chunk, and the gradients of the loss in logp and entropy."""
    compute = elementwise(policy_objective, logp)  # tens of tiny kernels per chunk otherwise
    with torch.enable_grad():
        leaves = logp.detach().requires_grad_(), entropy.detach().requires_grad_()
        loss, metrics = compute(leaves[0][None], leaves[1][None], row, objective)
        d_logp, d_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
    zeros = torch.zeros_like(logp)
    return loss.detach(), metrics, zeros if d_logp is None else d_logp, zeros if d_entropy is None else d_entropy


def _merged(parts: list[dict[str, MeanArrays]]) -> dict[str, MeanArrays]:
    def merge(means: list[MeanArrays]) -> MeanArrays:
        total, count, low, high = (torch.stack(column) for column in zip(*means, strict=True))
        return MeanArrays(total.sum(), count.sum(), low.amin(), high.amax())

    return {name: merge([part[name] for part in parts]) for name in parts[0]}
