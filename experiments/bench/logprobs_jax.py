"""The JAX rows of experiments.bench.logprobs."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to torch, and makes peaks meaningful

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rljax.backends.jax.fused import fused_objective
from rljax.backends.jax.logprobs import in_chunks, token_logprobs
from rljax.backends.jax.objective import policy_objective
from rljax.experiments.bench.logprobs_case import Case, Outcome, Variant
from rljax.objective.spec import TokenArrays

Function = Callable[..., tuple[Array, Array | None]]  # (hidden, unembedding, labels, tokens, case) -> loss, logp


def device() -> str:
    return f"jax {jax.__version__}, {jax.devices()[0].device_kind}"


class JaxVariant(Variant):
    def __init__(self, name: str, function: Function):
        self.name, self.function = name, function

    def _compiled(self, case: Case) -> tuple[Any, tuple[Any, ...]]:
        def loss(hidden: Array, unembedding: Array, labels: Array, tokens: TokenArrays) -> tuple[Array, Array | None]:
            return self.function(hidden, unembedding, labels, tokens, case)

        arrays = jax.tree.map(jnp.asarray, (case.hidden, case.unembedding, case.labels, case.tokens))
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(*arrays).compile(), arrays

    def check(self, case: Case) -> Outcome:
        compiled, arrays = self._compiled(case)
        (_, logp), grads = compiled(*arrays)
        wide = [np.asarray(x).astype(np.float64) for x in grads]
        return Outcome(None if logp is None else np.asarray(logp, np.float64), *wide)

    def measure(self, case: Case, repeats: int) -> tuple[float, float | None]:
        compiled, arrays = self._compiled(case)
        seconds = []
        for _ in range(repeats + 3):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arrays))
            seconds.append(time.perf_counter() - start)
        memory = compiled.memory_analysis()
        return float(np.median(seconds[3:])), None if memory is None else float(memory.temp_size_in_bytes)


def variants() -> Sequence[Variant]:
    return [
        JaxVariant("jax ours, fused (6MHV)", _fused),
        JaxVariant("jax ours, fused, float32 sum", functools.partial(_fused, accumulator=jnp.float32)),
        JaxVariant("jax ours, recomputed (8MHV)", _recomputed),
        JaxVariant("jax plain XLA", functools.partial(_plain, chunk=None)),
        JaxVariant("jax plain XLA, checkpointed 1024", functools.partial(_plain, chunk=1024)),
    ]


def _fused(hidden: Array, unembedding: Array, labels: Array, tokens: TokenArrays, case: Case, accumulator: Any = None) -> Any:
    static: dict[str, Any] = dict(temperature=case.temperature, softcap=case.softcap, chunk=case.chunk, accumulator=accumulator)
    return fused_objective(hidden, unembedding, labels, tokens, case.objective, **static)[0], None


def _recomputed(hidden: Array, unembedding: Array, labels: Array, tokens: TokenArrays, case: Case) -> Any:
    static: dict[str, Any] = dict(temperature=case.temperature, softcap=case.softcap, chunk=case.chunk)
    logp, entropy = token_logprobs(hidden, unembedding, labels, **static)
    return policy_objective(logp[None], entropy[None], tokens, case.objective)[0], logp


def _plain(hidden: Array, unembedding: Array, labels: Array, tokens: TokenArrays, case: Case, chunk: int | None) -> Any:
    """Computes the loss without the op: logits, log-softmax, gather.

    With `chunk` it works in chunks that are computed again in the backward pass.
    """

    def scores(rows: tuple[Array, Array]) -> tuple[Array, Array]:
        logits = lax.dot_general(rows[0], unembedding, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if case.softcap is not None:
            logits = case.softcap * jnp.tanh(logits / case.softcap)
        log_p = jax.nn.log_softmax(logits / case.temperature)
        return jnp.take_along_axis(log_p, rows[1][:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)

    if chunk is None:
        logp, entropy = scores((hidden, labels))
    else:
        parts = lax.map(jax.checkpoint(scores), (in_chunks(hidden, chunk), in_chunks(labels, chunk)))
        logp, entropy = (x.reshape(-1)[: len(labels)] for x in parts)
    return policy_objective(logp[None], entropy[None], tokens, case.objective)[0], logp
