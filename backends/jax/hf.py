"""HF model directories to and from sharded parameters: each device's shard is read from disk,
nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from rljax.backends.jax.attention.interface import Attention
from rljax.backends.jax.attention.xla import XlaAttention
from rljax.backends.jax.model import abstract
from rljax.backends.jax.multihost import fetch
from rljax.backends.jax.parameters import Parameter, leaf_at, nested, parameters
from rljax.backends.jax.sharding import check, parameter_sharding, single_device_mesh
from rljax.hf.companion_files import write_companions
from rljax.hf.spec import ModelSpec
from rljax.hf.tensors import tensors
from rljax.hf.weights import DTYPES, MAX_FILE_BYTES, WeightReader, write_weights


def load(
    directory: Path | str,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    *,
    remat: str = "none",
    precise: bool = False,
    attention: Attention = XlaAttention(),
    unroll: bool = False,
    describe: bool = False,
    check_numbers: bool = True,
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Graph definition and parameters of a model directory, sharded over `mesh` as they are read.

    Args:
      mesh: None is the first device alone.
      dtype: computed in. param_dtype: stored.
      remat: "none", "full", "dots".
      precise, attention, unroll: see `Transformer`.
      describe: shapes, dtypes and shardings in the place of arrays, to compile for devices that are
        not there; of the directory, config.json alone is read.
      check_numbers: refuse weights with NaN or infinity.

    Raises:
      UserError: no such directory, no config.json, a model that is not implemented, a tensor that
        is missing or of another shape, a file that is truncated, a mesh that does not divide the
        model.
    """
    spec = ModelSpec.from_directory(directory)
    mesh = single_device_mesh() if mesh is None else mesh
    check(spec, mesh)
    graphdef, _ = abstract(
        spec, dtype=dtype, param_dtype=param_dtype, remat=remat, precise=precise, attention=attention, unroll=unroll
    )
    placed = {p: parameter_sharding(p, spec, mesh) for p in parameters(spec)}
    stored = jnp.dtype(param_dtype)
    if describe:
        return graphdef, nested({p.path: jax.ShapeDtypeStruct(p.shape, stored, sharding=placed[p]) for p in placed})
    reader = WeightReader(directory, check_numbers=check_numbers)
    reader.check(spec)
    return graphdef, nested({p.path: _read(p, reader, placed[p], stored) for p in placed})


def _read(parameter: Parameter, reader: WeightReader, sharding: NamedSharding, dtype: np.dtype) -> Array:
    read: dict[str, np.ndarray] = {}  # shards that several devices keep are read once

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        index = index or (slice(None),) * len(parameter.shape)
        key = str(index)
        if key not in read:
            read[key] = _read_shard(parameter, reader, index, dtype)
        return read[key]

    return jax.make_array_from_callback(parameter.shape, sharding, shard)


def _read_shard(parameter: Parameter, reader: WeightReader, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """Slice `index` of the JAX array, from the tensors of the layers it covers."""
    if not parameter.stacked:
        return reader.read(parameter.tensor, index).astype(dtype, copy=False)
    layers = range(parameter.shape[0])[index[0]]
    within = index[1:]
    sizes = [len(range(dim)[part]) for dim, part in zip(parameter.shape[1:], within, strict=True)]
    out = np.empty((len(layers), *sizes), dtype)
    for row, layer in enumerate(layers):
        tensor = reader.read(parameter.tensor_of(layer), within[::-1] if parameter.transposed else within)
        out[row] = tensor.T if parameter.transposed else tensor
    return out


def save(
    params: dict[str, Any],
    spec: ModelSpec,
    directory: Path | str,
    *,
    dtype: str = "float32",
    source: Path | str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a directory that transformers and SGLang load; process 0 does, and the others gather
    with it.

    One file's tensors are in host memory at a time.

    Args:
      params: as from `load`, without LoRA factors (`lora.merge` folds them in).
      dtype: stored: "float32", "bfloat16", "float16".
      source: the directory the model came from: its config.json, generation_config.json and
        tokenizer files are taken over.

    Raises:
      UserError: the disk is full or not writable.
    """
    directory, shapes = Path(directory), tensors(spec)
    left = iter(shapes)  # every process gathers all of them in this order, whatever becomes of the writing
    gather = _Gatherer(params, spec, dtype)

    def read(tensor: str) -> np.ndarray:
        assert next(left) == tensor
        return gather(tensor)

    try:
        if jax.process_index() == 0:
            write_companions(directory, spec, dtype, None if source is None else Path(source))
            write_weights(directory, shapes, read, dtype, max_file_bytes)
    finally:
        if jax.process_count() > 1:
            for tensor in left:
                gather(tensor)


class _Gatherer:
    """Reads HF tensors out of parameters by name, one layer of a stacked array at a time."""

    def __init__(self, params: dict[str, Any], spec: ModelSpec, dtype: str) -> None:
        self.params = params
        self.dtype = DTYPES[dtype]
        self.of_tensor = {
            parameter.tensor_of(layer): (parameter, layer)
            for parameter in parameters(spec)
            for layer in (range(spec.num_layers) if parameter.stacked else (0,))
        }

    def __call__(self, tensor: str) -> np.ndarray:
        parameter, layer = self.of_tensor[tensor]
        array = leaf_at(self.params, parameter.path)
        piece = array[layer] if parameter.stacked else array
        host = fetch(piece).astype(self.dtype, copy=False)
        return host.T if parameter.transposed else host
