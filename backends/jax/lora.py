"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): y = x (W + scale A B), scale = alpha / rank, W frozen.

A is uniform in +-1 / sqrt(inputs) and B is zero, so that an adapted model begins as its base.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from rljax.backends.jax.model import Transformer
from rljax.backends.jax.parameters import parameters
from rljax.backends.jax.sharding import fit
from rljax.config import LoraConfig
from rljax.errors import UserError
from rljax.hf.tensors import projections

Tree = dict[str, Any]
FACTORS = ("lora_a", "lora_b")


def add(graphdef: nnx.GraphDef, params: Tree, config: LoraConfig, mesh: Mesh, *, seed: int) -> tuple[nnx.GraphDef, Tree]:
    """The model with float32 factors beside the kernels of `config.target_modules`, split over the mesh as their kernels are.

    Raises UserError for a module that the model doesn't have.
    """
    model: Transformer = nnx.merge(graphdef, params)
    known = {name.split(".")[-1]: name for name in projections(model.spec)}
    axes = {p.path[1]: p.axes for p in parameters(model.spec) if p.path[-1] == "kernel" and p.stacked}
    for number, target in enumerate(config.target_modules):
        if target not in known:
            raise UserError(f"actor.lora.target_modules: no {target!r} ({', '.join(known)})")
        linear = getattr(model.layers, target)
        layers, inputs, outputs = linear.kernel.shape
        bound = 1 / math.sqrt(inputs)
        a = np.random.default_rng([seed, number]).uniform(-bound, bound, (layers, inputs, config.rank)).astype(np.float32)
        b = np.zeros((layers, config.rank, outputs), np.float32)
        linear.lora_a = nnx.data(nnx.LoRAParam(_place(a, (None, axes[target][1], None), mesh)))
        linear.lora_b = nnx.data(nnx.LoRAParam(_place(b, (None, None, axes[target][2]), mesh)))
        linear.lora_scale = config.alpha / config.rank
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def _place(array: np.ndarray, axes: tuple[str | None, ...], mesh: Mesh) -> Array:
    return jax.device_put(array, NamedSharding(mesh, fit(axes, array.shape, mesh.shape)))


def split(params: Tree) -> tuple[Tree, Tree]:
    """(factors, everything else), nested as they were."""
    factors: Tree = {}
    base: Tree = {}
    for key, value in params.items():
        if isinstance(value, dict):
            inner, rest = split(value)
            factors |= {key: inner} if inner else {}
            base |= {key: rest} if rest else {}
        else:
            (factors if key in FACTORS else base)[key] = value
    return factors, base


def join(factors: Tree, base: Tree) -> Tree:
    """The inverse of `split`."""
    joined = dict(base)
    for key, value in factors.items():
        joined[key] = join(value, base.get(key, {})) if isinstance(value, dict) else value
    return joined


def merge(params: Tree, scale: float) -> Tree:
    """Kernels with their factors folded in, in float32, and no factors: parameters as `hf.load` gives them."""
    if "lora_a" in params:
        delta = jnp.matmul(params["lora_a"], params["lora_b"], precision=jax.lax.Precision.HIGHEST) * scale
        rest = {key: value for key, value in params.items() if key not in FACTORS}
        return rest | {"kernel": params["kernel"].astype(jnp.float32) + delta}
    return {key: merge(value, scale) if isinstance(value, dict) else value for key, value in params.items()}
