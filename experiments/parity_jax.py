"""The JAX side of experiments.parity."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rljax.backends.jax import hf
from rljax.backends.jax.logprobs import token_logprobs
from rljax.backends.jax.objective import policy_objective
from rljax.backends.jax.parameters import leaf_at, parameters
from rljax.hf.spec import ModelSpec

if TYPE_CHECKING:
    from experiments.parity import Case


def run(case: Case) -> tuple[np.ndarray, np.ndarray, float, dict[str, np.ndarray]]:
    """Log-probs, entropies, loss, and gradients by tensor name."""
    with jax.enable_x64(True) if case.dtype == "float64" else contextlib.nullcontext():
        graphdef, params = hf.load(case.model_dir, dtype=jnp.dtype(case.dtype), param_dtype=jnp.dtype(case.dtype))
        spec = ModelSpec.from_directory(case.model_dir)

        def loss(params: Any) -> tuple[Array, tuple[Array, Array]]:
            model = nnx.merge(graphdef, params)
            hidden, _ = model(jnp.asarray(case.token_ids), jnp.asarray(case.positions), None)
            named = jnp.take_along_axis(hidden, jnp.asarray(case.compacted.source)[..., None], axis=1)
            labels = jnp.asarray(case.compacted.labels)
            flat = token_logprobs(
                named.reshape(-1, named.shape[-1]),
                model.unembedding(),
                labels.reshape(-1),
                temperature=case.config.gconfig.temperature,
                softcap=spec.final_softcap,
                chunk=case.config.actor.logprob_chunk,
            )
            logp, entropy = (x.reshape(labels.shape) for x in flat)
            tokens = jax.tree.map(jnp.asarray, case.compacted.tokens)
            return policy_objective(logp, entropy, tokens, case.objective)[0], (logp, entropy)

        (value, scores), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        logp, entropy = (np.asarray(x, np.float64) for x in scores)
        return logp, entropy, float(value), _by_tensor(grads, spec)


def _by_tensor(grads: Any, spec: ModelSpec) -> dict[str, np.ndarray]:
    """As Hugging Face names and lays them out."""
    tensors = {}
    for parameter in parameters(spec):
        array = np.asarray(leaf_at(grads, parameter.path)).astype(np.float64)
        for layer in range(spec.num_layers) if parameter.stacked else (0,):
            piece = array[layer] if parameter.stacked else array
            tensors[parameter.tensor_of(layer)] = piece.T if parameter.transposed else piece
    return tensors
