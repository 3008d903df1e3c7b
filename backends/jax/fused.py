"""The policy objective from hidden states, its gradient taken while the logits are there, in JAX.

What a token's loss needs beside its own logp and entropy (proximal and behavior log-probs,
advantage, normalizer) is known before the unembedding runs. So a chunk of logits goes through
objective, softmax gradient and both gradient matmuls at once and is never computed again: 6 MHV
operations where recomputing takes 8. Only objectives in which a token's loss depends on that token
alone (`Objective.by_token`) can be cut so.

Tokens without a gradient, as those of advantage 0, are there for the metrics alone. Rows are put in
order, those that may have a gradient first, and the chunks behind them take the first matmul only:
2 MHV.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from rljax.backends.jax.logprobs import (
    BY_ROW,
    BY_ROW_2D,
    BY_VOCABULARY,
    Scoring,
    d_logits,
    in_chunks,
    is_label,
    local_labels,
    logits_of,
    statistics,
    token_logprobs,
)
from rljax.backends.jax.objective import policy_objective
from rljax.objective.spec import MeanArrays, Objective, TokenArrays


def fused_objective(
    hidden: Float[Array, "M H"],
    unembedding: Float[Array, "V H"],
    labels: Int[Array, " M"],
    tokens: TokenArrays,
    objective: Objective,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 1024,
    accumulator: Any = None,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, ""], dict[str, MeanArrays]]:
    """`policy_objective` of `token_logprobs`: the same loss, metrics and gradients in hidden and
    unembedding.

    When it is differentiated the gradients are made in the forward pass, and the backward scales
    them by that of the loss. Metrics have no gradient.

    Args:
      tokens: arrays of [M], or of [R, m] with R * m = M in the order of hidden.
      objective: one whose `by_token` holds; others raise ValueError.
      chunk: rows; chunk * V logits are held at once.
      accumulator: dtype in which dL/d unembedding is summed over chunks; None for that of
        unembedding. float32 beside bfloat16 costs 4 V H bytes more and rounds once instead of once
        a chunk.
    """
    if not objective.by_token:
        raise ValueError(
            "a sequence-level objective cannot be cut into chunks of rows; use token_logprobs and policy_objective"
        )
    flat = jax.tree.map(lambda x: jnp.reshape(x, (-1,)), tokens)
    scoring = Scoring(temperature, softcap, chunk, mesh)
    return _fused(hidden, unembedding, labels, flat, objective, scoring, accumulator)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _fused(
    hidden: Array,
    unembedding: Array,
    labels: Array,
    tokens: TokenArrays,
    objective: Objective,
    scoring: Scoring,
    accumulator: Any,
) -> tuple[Array, dict[str, MeanArrays]]:
    logp, entropy = token_logprobs(
        hidden,
        unembedding,
        labels,
        temperature=scoring.temperature,
        softcap=scoring.softcap,
        chunk=scoring.chunk,
        mesh=scoring.mesh,
    )
    return policy_objective(logp[None], entropy[None], _as_row(tokens), objective)


def _fused_forward(
    hidden: Array,
    unembedding: Array,
    labels: Array,
    tokens: TokenArrays,
    objective: Objective,
    scoring: Scoring,
    accumulator: Any,
) -> tuple[Any, Any]:
    local = functools.partial(_loss_and_grads, objective=objective, scoring=scoring, accumulator=accumulator)
    by_token = jax.tree.map(lambda _: BY_ROW, tokens)
    whole = PartitionSpec()
    forward = scoring.sharded(local, (BY_ROW_2D, BY_VOCABULARY, BY_ROW, by_token), (whole, whole, BY_ROW_2D, BY_VOCABULARY))
    loss, metrics, d_hidden, d_unembedding = forward(hidden, unembedding, labels, tokens)
    return (loss, metrics), (d_hidden, d_unembedding)


def _fused_backward(
    objective: Objective, scoring: Scoring, accumulator: Any, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    d_loss = cotangents[0]
    d_hidden, d_unembedding = residuals
    return (d_hidden * d_loss).astype(d_hidden.dtype), (d_unembedding * d_loss).astype(d_unembedding.dtype), None, None


_fused.defvjp(_fused_forward, _fused_backward)


def _loss_and_grads(
    hidden: Array,
    unembedding: Array,
    labels: Array,
    tokens: TokenArrays,
    *,
    objective: Objective,
    scoring: Scoring,
    accumulator: Any,
) -> tuple[Array, dict[str, MeanArrays], Array, Array]:
    """Loss, metrics and both gradients of this device's part, a chunk of rows at a time."""
    labels = local_labels(labels, unembedding, scoring)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)

    def loss_of(logp: Array, entropy: Array, rows: TokenArrays) -> tuple[Array, dict[str, MeanArrays]]:
        return policy_objective(logp[None], entropy[None], _as_row(rows), objective)

    def with_gradient(index: Array, carry: tuple[Any, Any, Array, Array]) -> tuple[Any, Any, Array, Array]:
        loss, metrics, d_unembedding, d_hidden = carry
        rows, row_labels, row_tokens = jax.tree.map(lambda x: x[index], chunks)
        logits, squashed = logits_of(rows, unembedding, scoring)
        logp, entropy, lse = statistics(logits, row_labels, scoring)
        (part, part_metrics), slopes = jax.value_and_grad(loss_of, (0, 1), has_aux=True)(logp, entropy, row_tokens)
        hit = is_label(row_labels, logits.shape[-1], 0)
        slope = d_logits(logits, squashed, hit, entropy, lse, slopes[0], slopes[1], scoring)
        slope = slope.astype(hidden.dtype)
        d_rows = lax.dot_general(slope, unembedding, (((1,), (0,)), ((), ())), preferred_element_type=wide)
        d_unembedding += lax.dot_general(slope, rows, (((0,), (0,)), ((), ())), preferred_element_type=d_unembedding.dtype)
        return loss + part, _merge(metrics, part_metrics), d_unembedding, d_hidden.at[index].set(d_rows)

    def without(index: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        rows, row_labels, row_tokens = jax.tree.map(lambda x: x[index], chunks)
        logp, entropy, _ = statistics(logits_of(rows, unembedding, scoring)[0], row_labels, scoring)
        part, part_metrics = loss_of(logp, entropy, row_tokens)
        return carry[0] + part, _merge(carry[1], part_metrics)

    several = len(labels) > scoring.chunk and objective.by_advantage  # chunks, of which some may have no gradient
    moved = objective.moved_by(tokens)
    order = jnp.argsort(~moved) if several else slice(None)  # stable
    chunks = jax.tree.map(lambda x: in_chunks(x[order], scoring.chunk), (hidden, labels, tokens))
    count, size = chunks[1].shape
    # As many on every device: reductions over the vocabulary are in the loops.
    with_gradients = scoring.over_rows(lax.pmax, -(-jnp.sum(moved) // size)) if several else count
    first = jax.tree.map(lambda x: x[0], chunks)
    shapes = jax.eval_shape(loss_of, *jax.eval_shape(lambda: (jnp.zeros(size, wide),) * 2), first[2])
    sums = jnp.zeros(unembedding.shape, accumulator or unembedding.dtype), jnp.zeros(chunks[0].shape, wide)
    loss, metrics, d_unembedding, d_ordered = lax.fori_loop(0, with_gradients, with_gradient, (*_of_no_token(shapes), *sums))
    d_hidden = d_ordered.reshape(-1, hidden.shape[1])[: len(labels)]
    if several:
        loss, metrics = lax.fori_loop(with_gradients, count, without, (loss, metrics))
        d_hidden = jnp.zeros_like(d_hidden).at[order].set(d_hidden, unique_indices=True)
    d_hidden = scoring.over_vocabulary(lax.psum, d_hidden)
    d_unembedding = scoring.over_rows(lax.psum, d_unembedding.astype(unembedding.dtype))
    return scoring.over_rows(lax.psum, loss), _over_ranks(metrics, scoring), d_hidden.astype(hidden.dtype), d_unembedding


def _as_row(tokens: TokenArrays) -> TokenArrays:
    return jax.tree.map(lambda x: x[None], tokens)


def _of_no_token(shapes: tuple[Any, dict[str, Any]]) -> tuple[Array, dict[str, MeanArrays]]:
    """Returns the loss and the metrics of no token, to add those of chunks to."""
    loss, metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return loss, {
        name: mean._replace(min=jnp.full_like(mean.min, jnp.inf), max=jnp.full_like(mean.max, -jnp.inf))
        for name, mean in metrics.items()
    }


def _over_ranks(metrics: dict[str, MeanArrays], scoring: Scoring) -> dict[str, MeanArrays]:
    """Reduces metrics over the devices that have other rows."""
    return {
        name: MeanArrays(
            scoring.over_rows(lax.psum, mean.sum),
            scoring.over_rows(lax.psum, mean.count),
            scoring.over_rows(lax.pmin, mean.min),
            scoring.over_rows(lax.pmax, mean.max),
        )
        for name, mean in metrics.items()
    }


def _merge(a: dict[str, MeanArrays], b: dict[str, MeanArrays]) -> dict[str, MeanArrays]:
    return {
        name: MeanArrays(
            a[name].sum + b[name].sum,
            a[name].count + b[name].count,
            jnp.minimum(a[name].min, b[name].min),
            jnp.maximum(a[name].max, b[name].max),
        )
        for name in a
    }
