"""Which chunks of rows the fused objective takes the gradient of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.backends.jax import fused
from rljax.objective.spec import Objective, TokenArrays


@pytest.mark.parametrize("objective, chunks", [(Objective(), 2), (Objective(entropy_coef=0.1), 8)])
def test_chunks_of_tokens_of_advantage_0_take_no_gradient_matmul(monkeypatch, objective, chunks):
    taken, d_logits = [], fused.d_logits

    def counted(*args):
        jax.debug.callback(lambda: taken.append(1))
        return d_logits(*args)

    monkeypatch.setattr(fused, "d_logits", counted)
    random, rows = np.random.default_rng(0), 80
    hidden, unembedding = (jnp.asarray(random.normal(size=(size, 8))) for size in (rows, 32))
    every, zero = jnp.ones(rows), jnp.zeros(rows)
    with_advantage = jnp.arange(rows) % 5 == 0  # 16 of 80, in chunks of 10
    tokens = TokenArrays(every, every > 0, with_advantage.astype(float), zero - 3, jnp.ones(rows, int))
    jax.block_until_ready(
        jax.grad(lambda x: fused.fused_objective(x, unembedding, jnp.zeros(rows, int), tokens, objective, chunk=10)[0])(hidden)
    )
    jax.effects_barrier()
    assert len(taken) == chunks
