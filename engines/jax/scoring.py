"""The bitwise mode: sampler and learner score sequences by one program of one shape, so that their
log-probs are equal bits.

A sequence stands alone, at the start of a row of fixed length, and every one of its tokens is
scored, so that its numbers depend on weights and tokens alone. What other rows of the call hold
doesn't reach it (tested on the CPU).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rljax.backends.jax.forward import target_logprobs
from rljax.backends.jax.mesh import dispatching, row_shards, rows_sharding
from rljax.backends.jax.model import abstract
from rljax.backends.jax.sharding import replicated
from rljax.config.schema import Config
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.rows import Rows
from rljax.engines.jax.tuning import logit_rows_of, padded_length
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.objective.spec import TokenArrays

ROWS_PER_SHARD = 8  # of one call


class BitwiseScorer:
    """Log-probs of whole sequences.

    Parameters come in the master dtype, merged with any adapters.

    Example: scorer(params, [np.array([9, 4, 7, 2])]) -> [array([0., -1.2, -0.3, -0.8])]
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, dtype: str, temperature: float, chunk: int, length: int, precise: bool
    ) -> None:
        """
        Args:
          length: tokens of the longest sequence.
        """
        self._mesh = mesh
        self._length = padded_length(length, mesh)
        self._rows = ROWS_PER_SHARD * row_shards(mesh)
        graphdef, _ = abstract(spec, dtype=dtype, precise=precise)

        def score(params: Any, rows: Rows) -> jax.Array:
            model = nnx.merge(graphdef, params)
            return target_logprobs(model, rows, mesh, temperature=temperature, chunk=chunk)[0]

        self._score = jax.jit(score, out_shardings=replicated(mesh))

    def __call__(self, params: Any, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the log-probs of each sequence of T token ids, [T] float32, nats.

        0 at the first token, which has no context.
        """
        outputs = []
        for start in range(0, len(sequences), self._rows):
            rows = self._place(sequences[start : start + self._rows])
            with jax.set_mesh(self._mesh), dispatching(self._mesh):
                outputs.append(self._score(params, rows))
        scored = [row for block in jax.device_get(outputs) for row in block]
        return [_shifted(logp, len(s)) for logp, s in zip(scored, sequences, strict=False)]

    def _place(self, sequences: Sequence[np.ndarray]) -> Rows:
        token_ids = np.zeros((self._rows, self._length), np.int32)
        segment_ids = np.zeros_like(token_ids)
        for row, sequence in enumerate(sequences):
            if len(sequence) > self._length:
                raise UserError(
                    f"jax.context_length: a sequence of {len(sequence)} tokens is longer than the bitwise mode's {self._length}"
                )
            token_ids[row, : len(sequence)] = sequence
            segment_ids[row, : len(sequence)] = 1
        index = np.broadcast_to(np.arange(self._length, dtype=np.int32), token_ids.shape)
        labels = np.roll(token_ids, -1, axis=1)  # slot t is of token t + 1
        none = TokenArrays(None, None, None, None, None)
        return jax.device_put(Rows(token_ids, index, segment_ids, index, labels, none), rows_sharding(self._mesh))


def _shifted(logp: np.ndarray, tokens: int) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.float32), logp[: tokens - 1]])


@functools.cache
def bitwise_scorer(
    spec: ModelSpec, mesh: Mesh, dtype: str, temperature: float, chunk: int, length: int, precise: bool
) -> BitwiseScorer:
    """One scorer, and so one compiled program, for all who ask with the same arguments: the
    sampler and the learner.
    """
    return BitwiseScorer(spec, mesh, dtype, temperature, chunk, length, precise)


def scorer_of(config: Config, spec: ModelSpec, mesh: Mesh) -> BitwiseScorer:
    """The scorer of a run.

    `mesh` is the pool's: the bits agree where sampler and learner have pools of the same shape.
    """
    actor, settings = config.actor, JaxConfig.of(config)
    chunk, length = logit_rows_of(config, spec, mesh), settings.context_length
    return bitwise_scorer(spec, mesh, actor.dtype, config.gconfig.temperature, chunk, length, settings.precise)
