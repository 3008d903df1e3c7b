"""Log-probabilities and entropy of labels from hidden states, without ever holding [M, V] logits,
in JAX.

The forward cuts the rows, `chunk` at a time: a row's log-sum-exp needs its whole vocabulary. The
backward cuts the vocabulary instead, into blocks of as many elements: each block of dL/d
unembedding is then one matmul over all rows, summed in float32 inside it, and no [V, H]
accumulator exists beside the gradient itself. Logits are computed twice (8 MHV operations in all);
`fused_objective` computes them once (6 MHV) for losses that are known token by token.

Under a mesh the rows are sharded over "data" and "fsdp" and the vocabulary over "tensor"; then
three [rows] reductions cross the tensor axis, never logits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

ROWS = ("data", "fsdp")  # mesh axes
VOCABULARY = "tensor"


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Settings of the op, static in compiled programs, and its reductions over a mesh."""

    temperature: float = 1.0
    softcap: float | None = None
    chunk: int = 1024
    mesh: Mesh | None = None

    def sharded(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """Returns the function as each device runs it on its part; itself without a mesh."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def over_vocabulary(self, reduce: Any, x: Array) -> Array:
        return x if self.mesh is None else reduce(x, VOCABULARY)

    def over_rows(self, reduce: Any, x: Array) -> Array:
        return x if self.mesh is None else reduce(x, ROWS)


BY_ROW = PartitionSpec(ROWS)
BY_ROW_2D = PartitionSpec(ROWS, None)
BY_VOCABULARY = PartitionSpec(VOCABULARY, None)


def token_logprobs(
    hidden: Float[Array, "M H"],
    unembedding: Float[Array, "V H"],
    labels: Int[Array, " M"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int = 1024,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
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
      mesh: with axes "data", "fsdp" (rows) and "tensor" (vocabulary), of type Auto; None on one
        device.

    Returns:
      logp [M] and entropy [M], nats, float32 (float64 for float64 inputs).
    """
    return _token_logprobs(hidden, unembedding, labels, Scoring(temperature, softcap, chunk, mesh))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _token_logprobs(hidden: Array, unembedding: Array, labels: Array, scoring: Scoring) -> tuple[Array, Array]:
    logp, entropy, _ = _scores(hidden, unembedding, labels, scoring)
    return logp, entropy


def _token_logprobs_forward(hidden: Array, unembedding: Array, labels: Array, scoring: Scoring) -> tuple[Any, Any]:
    logp, entropy, lse = _scores(hidden, unembedding, labels, scoring)
    return (logp, entropy), (hidden, unembedding, labels, entropy, lse)


def _token_logprobs_backward(scoring: Scoring, residuals: Any, cotangents: tuple[Array, Array]) -> tuple[Array, Array, None]:
    hidden, unembedding, labels, entropy, lse = residuals
    backward = scoring.sharded(
        functools.partial(_backward, scoring=scoring),
        (BY_ROW_2D, BY_VOCABULARY, BY_ROW, BY_ROW, BY_ROW, BY_ROW, BY_ROW),
        (BY_ROW_2D, BY_VOCABULARY),
    )
    d_hidden, d_unembedding = backward(hidden, unembedding, labels, entropy, lse, *cotangents)
    return d_hidden, d_unembedding, None


_token_logprobs.defvjp(_token_logprobs_forward, _token_logprobs_backward)


def _scores(hidden: Array, unembedding: Array, labels: Array, scoring: Scoring) -> tuple[Array, Array, Array]:
    """logp, entropy and log-sum-exp, each [M]."""

    def local(hidden: Array, unembedding: Array, labels: Array) -> tuple[Array, Array, Array]:
        labels = local_labels(labels, unembedding, scoring)

        def one(rows: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            return statistics(logits_of(rows[0], unembedding, scoring)[0], rows[1], scoring)

        results = lax.map(one, (in_chunks(hidden, scoring.chunk), in_chunks(labels, scoring.chunk)))
        return jax.tree.map(lambda x: x.reshape(-1)[: len(labels)], results)

    specs = (BY_ROW_2D, BY_VOCABULARY, BY_ROW)
    return scoring.sharded(local, specs, (BY_ROW, BY_ROW, BY_ROW))(hidden, unembedding, labels)


def in_chunks(x: Array, chunk: int) -> Array:
    """[M, ...] -> [n, C, ...] with C <= chunk as even as can be; rows past M are zeros."""
    rows = x.shape[0]
    n = max(-(-rows // chunk), 1)
    size = max(-(-rows // n), 1)
    padded = jnp.pad(x, [(0, n * size - rows)] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(n, size, *x.shape[1:])


def logits_of(hidden: Array, unembedding: Array, scoring: Scoring) -> tuple[Array, Array | None]:
    """Tempered logits [C, V] in float32 at least, and tanh(logit / softcap) if there is one."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = lax.dot_general(hidden, unembedding, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    if scoring.softcap is None:
        return logits / scoring.temperature, None
    squashed = jnp.tanh(logits / scoring.softcap)
    return squashed * (scoring.softcap / scoring.temperature), squashed


def statistics(logits: Array, labels: Array, scoring: Scoring) -> tuple[Array, Array, Array]:
    """logp, entropy and log-sum-exp of rows of logits, each [C]; logits may be a shard of the
    vocabulary.
    """
    peak = scoring.over_vocabulary(lax.pmax, jnp.max(logits, axis=-1))
    shifted = logits - peak[:, None]
    weights = jnp.exp(shifted)
    total = scoring.over_vocabulary(lax.psum, jnp.sum(weights, axis=-1))
    moment = scoring.over_vocabulary(lax.psum, jnp.sum(weights * shifted, axis=-1))
    log_total = jnp.log(total)
    at_label = jnp.sum(jnp.where(is_label(labels, logits.shape[-1], 0), shifted, 0.0), axis=-1)
    at_label = scoring.over_vocabulary(lax.psum, at_label)
    return at_label - log_total, log_total - moment / total, peak + log_total


def d_logits(
    logits: Array,
    squashed: Array | None,
    hit: Array,
    entropy: Array,
    lse: Array,
    d_logp: Array,
    d_entropy: Array,
    scoring: Scoring,
) -> Array:
    """dL/d(hidden @ unembedding.T), [C, V]."""
    log_p = logits - lse[:, None]
    p = jnp.exp(log_p)
    slope = jnp.where(hit, d_logp[:, None], 0.0) - p * (d_logp[:, None] + d_entropy[:, None] * (log_p + entropy[:, None]))
    if squashed is not None:
        slope *= 1 - squashed**2
    return slope / scoring.temperature


def is_label(labels: Array, width: int, start: Array | int) -> Array:
    """[C, width] bool: which of the columns start, start + 1, ... is the row's label; none, when
    another shard has it.
    """
    return labels[:, None] == start + jnp.arange(width, dtype=labels.dtype)


def local_labels(labels: Array, unembedding: Array, scoring: Scoring) -> Array:
    """Labels counted from the first row of this device's shard of the unembedding."""
    return labels if scoring.mesh is None else labels - lax.axis_index(VOCABULARY) * unembedding.shape[0]


def _backward(
    hidden: Array,
    unembedding: Array,
    labels: Array,
    entropy: Array,
    lse: Array,
    d_logp: Array,
    d_entropy: Array,
    *,
    scoring: Scoring,
) -> tuple[Array, Array]:
    """dL/d hidden and dL/d unembedding of this device's part, a block of the vocabulary at a time."""
    rows, vocabulary = hidden.shape[0], unembedding.shape[0]
    block = min(vocabulary, -(-max(scoring.chunk * vocabulary // max(rows, 1), 1) // 128) * 128)
    labels = local_labels(labels, unembedding, scoring)

    def add_block(start: Array | int, width: int, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_unembedding = grads
        part = lax.dynamic_slice_in_dim(unembedding, start, width)
        logits, squashed = logits_of(hidden, part, scoring)
        slope = d_logits(logits, squashed, is_label(labels, width, start), entropy, lse, d_logp, d_entropy, scoring)
        slope = slope.astype(hidden.dtype)
        d_part = lax.dot_general(slope, hidden, (((0,), (0,)), ((), ())), preferred_element_type=d_hidden.dtype)
        d_hidden += lax.dot_general(slope, part, (((1,), (0,)), ((), ())), preferred_element_type=d_hidden.dtype)
        return d_hidden, lax.dynamic_update_slice_in_dim(d_unembedding, d_part.astype(unembedding.dtype), start, 0)

    grads = (jnp.zeros(hidden.shape, lse.dtype), jnp.zeros_like(unembedding))
    whole = vocabulary // block
    grads = lax.fori_loop(0, whole, lambda i, grads: add_block(i * block, block, grads), grads)
    if vocabulary % block:
        grads = add_block(whole * block, vocabulary % block, grads)
    d_hidden = scoring.over_vocabulary(lax.psum, grads[0])
    return d_hidden.astype(hidden.dtype), scoring.over_rows(lax.psum, grads[1])
