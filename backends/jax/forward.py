"""From packed rows to log-probs, entropies and values of the trained tokens, on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from rljax.backends.jax.logprobs import token_logprobs
from rljax.backends.jax.mesh import ROWS
from rljax.backends.jax.model import Transformer

LogProbs = Callable[[Array, Array, Array], tuple[Array, Array]]


def predicting_hidden(model: Transformer, rows: Any) -> Array:
    """Hidden states that predict the named tokens of each row, i.e. of the tokens before them. [r, m, H]"""
    hidden, _ = model(rows.token_ids, rows.positions, rows.segment_ids)
    return jnp.take_along_axis(hidden, rows.source[..., None], axis=1)


def sharded_logprobs(mesh: Mesh, *, temperature: float, softcap: float | None, chunk: int) -> LogProbs:
    """(hidden [r, m, H], unembedding [V, H], labels [r, m]) -> log-prob and entropy [r, m], float32, nats.

    Every device takes its own rows and, of those, its share of the slots along the tensor axis, against the whole
    vocabulary: the gathered unembedding is small beside one chunk of logits, and nothing of size V is ever exchanged.
    """
    slots = PartitionSpec(ROWS, "tensor")

    def local(hidden: Array, unembedding: Array, labels: Array) -> tuple[Array, Array]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        logp, entropy = token_logprobs(
            flat, unembedding, labels.reshape(-1), temperature=temperature, softcap=softcap, chunk=chunk
        )
        return logp.reshape(labels.shape), entropy.reshape(labels.shape)

    if mesh.size == 1:
        return local
    return jax.shard_map(
        local, mesh=mesh, in_specs=(slots, PartitionSpec(), slots), out_specs=(slots, slots), check_vma=False
    )
