"""The JAX path in experiments.compare: the sampler decodes, the learner's program scores."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from rljax.backends.jax import hf
from rljax.backends.jax.mesh import pool_mesh
from rljax.config import io as config_io
from rljax.config.allocation import Pool
from rljax.engines.jax.config import JaxConfig
from rljax.engines.jax.sampling.sampler import JaxSampler
from rljax.engines.jax.scoring import BitwiseScorer
from rljax.engines.jax.tuning import logit_rows_of
from rljax.errors import UserError
from rljax.experiments.comparison.case import Case, Greedy
from rljax.experiments.comparison.sampling import complete
from rljax.hf.spec import ModelSpec

SLOTS = 16  # prompts that are completed at once


class JaxSubject:
    """Implements `Subject` on the first device."""

    def __init__(self, case: Case) -> None:
        if case.pictures is not None:
            raise UserError("--engines: jax: the JAX path reads no pictures (compare transformers and sglang)")
        settings = {
            "jax.sampler_dtype": case.dtype,
            "jax.cache_dtype": case.dtype,
            "jax.context_length": str(case.longest),
            "jax.slots": str(min(len(case.prompts), SLOTS)),
        }
        case = dataclasses.replace(case, config=config_io.changed(case.config, list(settings.items())))
        self._case = case
        mesh = pool_mesh(Pool("jax"), sampling=True)
        spec = ModelSpec.from_directory(case.model_dir)
        precise = JaxConfig.of(case.config).precise
        self._graphdef, self._params = hf.load(case.model_dir, mesh, dtype=case.dtype, precise=precise)
        chunk = logit_rows_of(case.config, spec, mesh)
        self._scorer = BitwiseScorer(spec, mesh, case.dtype, 1.0, chunk, case.longest, precise)

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Greedy]:
        async def all_of_them() -> list[Greedy]:
            sampler = JaxSampler(self._case.config, Pool("jax"), self._case.model_dir)
            try:
                return await complete(sampler, prompts, self._case)
            finally:
                await sampler.close()

        return asyncio.run(all_of_them())

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [logp.astype(np.float64) for logp in self._scorer(self._params, sequences)]

    def hidden_states(self, sequence: np.ndarray) -> np.ndarray:
        model = nnx.merge(self._graphdef, self._params)
        states = jax.jit(type(model).hidden_states)(model, sequence[None], np.arange(len(sequence), dtype=np.int32)[None])
        return np.asarray(states[:, 0]).astype(np.float64)

    def close(self) -> None:
        del self._params
