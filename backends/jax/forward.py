"""Forward passes: log-probs, entropies and values of target tokens in packed rows, on any mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from rljax.backends.jax.fused import fused_objective
from rljax.backends.jax.logprobs import token_logprobs
from rljax.backends.jax.model import Transformer
from rljax.backends.jax.objective import policy_objective
from rljax.backends.jax.sharding import BATCH
from rljax.objective.spec import MeanArrays, Objective


def predicting_hidden(model: Transformer, rows: Any) -> Array:
    """Hidden states that predict the target tokens of each row: those of the tokens before them.

    [r, m, H]
    """
    hidden = model(rows.token_ids, rows.positions, rows.segment_ids, bounds=rows.bounds)
    return jnp.take_along_axis(hidden, rows.source[..., None], axis=1)


def target_logprobs(model: Transformer, rows: Any, mesh: Mesh, *, temperature: float, chunk: int) -> tuple[Array, Array]:
    """Log-prob and entropy of the target tokens under logits / temperature: [r, m] float32, nats.

    No [T, V] is ever held.
    """
    hidden, unembedding = predicting_hidden(model, rows), model.unembedding()
    scores = functools.partial(token_logprobs, temperature=temperature, softcap=model.spec.final_softcap, chunk=chunk)

    def flat(hidden: Array, unembedding: Array, labels: Array, mesh: Mesh | None = None) -> tuple[Array, Array]:
        results = scores(hidden.reshape(-1, hidden.shape[-1]), unembedding, labels.reshape(-1), mesh=mesh)
        logp, entropy = (result.reshape(labels.shape) for result in results)
        return logp, entropy

    if mesh.size == 1:
        return flat(hidden, unembedding, rows.labels)
    if _divides_vocabulary(unembedding, mesh):
        return flat(hidden, unembedding, rows.labels, mesh)
    # The tensor axis does not divide the vocabulary, so it takes a share of every row's slots instead.
    slots = PartitionSpec(BATCH, "tensor")
    return jax.shard_map(flat, mesh=mesh, in_specs=(slots, PartitionSpec(), slots), out_specs=(slots, slots), check_vma=False)(
        hidden, unembedding, rows.labels
    )


def target_objective(
    model: Transformer, rows: Any, mesh: Mesh, objective: Objective, *, temperature: float, chunk: int
) -> tuple[Array, dict[str, MeanArrays]]:
    """Loss and metrics of the target tokens, by `policy_objective`; fused with the unembedding
    where the objective allows it.
    """
    unembedding = model.unembedding()
    if not objective.by_token or not _divides_vocabulary(unembedding, mesh):
        logp, entropy = target_logprobs(model, rows, mesh, temperature=temperature, chunk=chunk)
        return policy_objective(logp, entropy, rows.tokens, objective)
    hidden = predicting_hidden(model, rows)
    return fused_objective(
        hidden.reshape(-1, hidden.shape[-1]),
        unembedding,
        rows.labels.reshape(-1),
        rows.tokens,
        objective,
        temperature=temperature,
        softcap=model.spec.final_softcap,
        chunk=chunk,
        accumulator=jnp.float32,  # a sum of many chunks
        mesh=None if mesh.size == 1 else mesh,
    )


def _divides_vocabulary(unembedding: Array, mesh: Mesh) -> bool:
    return unembedding.shape[0] % mesh.shape["tensor"] == 0


def target_values(model: Transformer, head: Array, rows: Any) -> Array:
    """Returns the critic's value before each target token is drawn: [r, m] float32, reward
    units.
    """
    return predicting_hidden(model, rows).astype(jnp.float32) @ head.astype(jnp.float32)
