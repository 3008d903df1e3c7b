"""The teacher of on-policy distillation: a frozen model of another directory that scores what the
policy sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from rljax.backends.jax import hf
from rljax.backends.jax.attention.choice import able_or_plain, problem_of
from rljax.backends.jax.attention.interface import Attention
from rljax.backends.jax.forward import target_logprobs
from rljax.backends.jax.sharding import replicated
from rljax.config.schema import Config
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.rows import Rows
from rljax.engines.jax.tuning import logit_rows_of, longest_row
from rljax.hf.spec import ModelSpec


class Teacher:
    """Lies over the learner's mesh in `actor.dtype`, with no master weights and no moments.

    Its shape may be any.
    """

    def __init__(self, config: Config, directory: Path, mesh: Mesh, attention: Attention) -> None:
        """Loads the model. Raises UserError if it can't be loaded, or not on this mesh.

        Args:
          attention: the policy's, for whose bounds the rows are cut.
        """
        spec, dtype, temperature = ModelSpec.from_directory(directory), config.actor.dtype, config.gconfig.temperature
        chunk = logit_rows_of(config, spec, mesh)
        problem = problem_of(spec, dtype, mesh.local_devices[0], longest_row(config, mesh))
        precise = JaxConfig.of(config).precise
        graphdef, self._params = hf.load(
            directory, mesh, dtype, dtype, precise=precise, attention=able_or_plain(attention, problem, "actor.distill.teacher")
        )

        def logp_of(params: Any, rows: Rows) -> jax.Array:
            return target_logprobs(nnx.merge(graphdef, params), rows, mesh, temperature=temperature, chunk=chunk)[0]

        self._score = jax.jit(logp_of, out_shardings=replicated(mesh))

    def score(self, rows: Rows) -> jax.Array:
        """[r, m] float32, nats: log-probs of the target tokens at the sampling temperature."""
        return self._score(self._params, rows)
