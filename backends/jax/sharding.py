"""Meshes over the axes data, fsdp and tensor, and how parameters, activations and caches are split
over them.

    data    rows of a batch
    fsdp    rows of a batch, and the hidden dimension of every matrix: gathered for use, scattered
            after the gradient
    tensor  attention heads, feed-forward width, vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rljax.backends.jax.parameters import Parameter, nested, parameters
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec
from rljax.hf.splits import check_shards, check_tensor

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "hidden": (BATCH, None, None),  # [B, T, H]
    "heads": (BATCH, None, "tensor", None),  # [B, T, heads, D]
    "feed_forward": (BATCH, None, "tensor"),  # [B, T, F]
    "rows": (BATCH, None),  # [B, T]
    "logits": (BATCH, "tensor"),  # [B, V]
}


def make_mesh(devices: Sequence[jax.Device], *, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of data * fsdp * tensor devices; tensor-parallel neighbors are adjacent."""
    shape = (data, fsdp, tensor)
    if math.prod(shape) != len(devices):
        raise UserError(f"allocation_mode: d{data}f{fsdp}t{tensor} needs {math.prod(shape)} devices, not {len(devices)}")
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


def single_device_mesh(device: jax.Device | None = None) -> Mesh:
    """A mesh of one device, the first by default."""
    return make_mesh([device or jax.devices()[0]])


def shardings(spec: ModelSpec, mesh: Mesh) -> dict[str, Any]:
    """NamedSharding of every parameter. Raises UserError for what the mesh cannot divide."""
    check(spec, mesh)
    return nested({p.path: parameter_sharding(p, spec, mesh) for p in parameters(spec)})


def parameter_sharding(parameter: Parameter, spec: ModelSpec, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of one parameter.

    Key and value projections are replicated over `tensor` where it does not divide their heads.
    """
    whole_heads = spec.num_kv_heads % mesh.shape["tensor"] == 0
    keys_or_values = parameter.path[1] in ("k_proj", "v_proj")
    axes = tuple(None if axis == "tensor" and keys_or_values and not whole_heads else axis for axis in parameter.axes)
    return NamedSharding(mesh, fit(axes, parameter.shape, mesh.shape))


def check(spec: ModelSpec, mesh: Mesh) -> None:
    """Raises UserError where an axis does not divide what it must.

    The vocabulary may stay whole.
    """
    check_tensor(spec, mesh.shape["tensor"], key_heads=False)
    check_shards(spec, mesh.shape["fsdp"])


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def activation_sharding(mesh: Mesh, kind: str, shape: tuple[int, ...]) -> NamedSharding:
    """Returns the sharding of an array of a kind in ACTIVATIONS: inputs, caches, donated buffers.

    Dimensions that do not divide are left whole.
    """
    return NamedSharding(mesh, fit(ACTIVATIONS[kind], shape, mesh.shape))


def constrain(x: Array, kind: str) -> Array:
    """Inside jit, under `jax.set_mesh(mesh)`: says how an activation is split.

    Nothing without a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or mesh.size == 1 or not set(AXES) <= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, fit(ACTIVATIONS[kind], x.shape, mesh.shape))


def fit(axes: Sequence[Any], shape: Sequence[int], sizes: Any) -> PartitionSpec:
    """The axes as a PartitionSpec, less those that do not divide their dimension."""
    fitted: list[Any] = []
    for axis, dim in zip(axes, shape, strict=True):
        names = [axis] if isinstance(axis, str) else list(axis or ())
        while names and dim % math.prod(sizes[name] for name in names):
            names.pop()
        fitted.append(names[0] if len(names) == 1 else tuple(names) or None)
    return PartitionSpec(*fitted)
