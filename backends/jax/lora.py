"""LoRA (Hu et al. 2021, arXiv:2106.09685): trained factors A, B beside a frozen W.

    y = x W + (alpha / rank) x A B

Example:

    targets = ("q_proj", "v_proj")
    graphdef, adapters = lora.add(graphdef, params, rank=16, alpha=32.0, targets=targets, seed=1)
    model = nnx.merge(graphdef, params, adapters)          # gradients of the adapters alone
    whole = lora.merge(params, adapters, scale=32.0 / 16)  # for `hf.save`, or a plain sampler
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from rljax.backends.jax.model import Lora, Transformer, abstract, dot
from rljax.backends.jax.multihost import Place, put
from rljax.backends.jax.parameters import nested, parameters
from rljax.backends.jax.sharding import fit, single_device_mesh
from rljax.config.checks import check_targets
from rljax.hf.adapter import A, B
from rljax.hf.spec import ModelSpec
from rljax.hf.tensors import layer_tensor, projections
from rljax.hf.weights import write_json, write_tensors


def add(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    seed: int,
    mesh: Mesh | None = None,
    dtype: jnp.dtype | type = jnp.float32,
    place: Place = put,
    given: Mapping[str, np.ndarray] | None = None,
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Adapters for the projections in `targets`, all layers. B starts at zero, so nothing changes
    before training, unless an adapter is given.

    Args:
      params: of the base model, as from `hf.load`; not copied.
      seed: of A, uniform in +-1/sqrt(inputs) as in peft. A factor depends on seed and its name
        only.
      mesh: the base's; None is the first device alone.
      dtype: stored.
      place: `describe` where nothing but shapes is wanted.
      given: factors to begin with, as rljax/hf/adapter.py reads them.

    Returns:
      Graph definition for `nnx.merge(graphdef, params, adapters)`, and {"layers": {target:
      {"lora_a", "lora_b"}}} with lora_a [L, inputs, rank], lora_b [L, rank, outputs].
    """
    check_targets(targets)
    model: Transformer = nnx.eval_shape(lambda: nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, params)))
    lora = Lora(rank, alpha / rank, tuple(targets))
    with_factors, _ = abstract(model.spec, dtype=model.dtype, remat=model.remat, lora=lora, precise=model.precise)
    leaves: dict[tuple[str, ...], Any] = {}
    mesh = single_device_mesh() if mesh is None else mesh
    for parameter in parameters(model.spec):
        if parameter.path[1] not in targets or parameter.path[2:] != ("kernel",):
            continue
        layers, inputs, outputs = parameter.shape
        bound = inputs**-0.5
        generator = np.random.default_rng([seed, zlib.crc32(parameter.tensor.encode())])
        a = generator.uniform(-bound, bound, (layers, inputs, rank)).astype(dtype)
        b = np.zeros((layers, rank, outputs), dtype)
        if given is not None:
            projection = next(name for name in projections(model.spec) if name.endswith(f".{parameter.path[1]}"))
            a, b = (
                np.stack([given[layer_tensor(layer, f"{projection}.{factor}")].T for layer in range(layers)]).astype(dtype)
                for factor in (A, B)
            )
        into, out = parameter.axes[1:]
        for name, value, axes in (("lora_a", a, (None, into, None)), ("lora_b", b, (None, None, out))):
            leaves[(*parameter.path[:2], name)] = place(value, NamedSharding(mesh, fit(axes, value.shape, mesh.shape)))
    return with_factors, nested(leaves)


def merge(params: dict[str, Any], adapters: dict[str, Any], scale: float) -> dict[str, Any]:
    """W + scale A B where there are adapters; every other leaf is the one of `params`. scale is
    alpha / rank.
    """
    layers = dict(params["layers"])
    for name, update in updates(adapters, scale).items():
        kernel = layers[name]["kernel"]
        layers[name] = {**layers[name], "kernel": (kernel + update).astype(kernel.dtype)}
    return {**params, "layers": layers}


def updates(adapters: dict[str, Any], scale: float) -> dict[str, jax.Array]:
    """scale A B of each adapted projection by its name: [L, inputs, outputs] each."""
    return {name: _product(factors["lora_a"], factors["lora_b"]) * scale for name, factors in adapters["layers"].items()}


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.vmap(dot)(a, b)


def save(
    adapters: dict[str, Any], spec: ModelSpec, directory: Path | str, *, alpha: float, base: str = "", dtype: str = "float32"
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json as peft reads them."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    host = jax.device_get(adapters["layers"])
    names = {name.split(".")[-1]: name for name in projections(spec)}
    arrays = {}
    for target, factors in host.items():
        for layer in range(spec.num_layers):
            stem = f"base_model.model.{layer_tensor(layer, names[target])}"
            arrays[f"{stem}.lora_A.weight"] = factors["lora_a"][layer].T
            arrays[f"{stem}.lora_B.weight"] = factors["lora_b"][layer].T
    write_tensors(directory / "adapter_model.safetensors", arrays, dtype)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": int(next(iter(host.values()))["lora_a"].shape[-1]),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(host),
        "inference_mode": True,
    }
    write_json(directory / "adapter_config.json", config)
