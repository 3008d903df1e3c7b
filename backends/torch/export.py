"""Gathers whole tensors of sharded parameters, one at a time under HF names, and writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rljax.backends.torch.mesh import MAX, RankMesh, like, local
from rljax.errors import UserError
from rljax.hf.companion_files import write_companions
from rljax.hf.other_model import Model
from rljax.hf.tensors import tensors
from rljax.hf.whole_model import write_model

Whole = Callable[[str], Tensor]


def gathered(parameter: DTensor, dtype: torch.dtype) -> Tensor:
    """Returns the whole parameter, on every rank.

    A collective, unless every rank has all of it; then it may share the parameter's memory.
    """
    shard = local(parameter).to(dtype)
    alike = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    if all(size == 1 or placement.is_replicate() for size, placement in alike):
        return shard
    return like(parameter, shard).full_tensor()


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Copies a tensor to the host, in the same dtype."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


class Gathering:
    """Iterates over all tensors of a model by name; each is gathered when it is asked for.

    Each is a collective, so every rank iterates over its own. A rank that stops early leaves the
    others waiting; `close` gathers the rest.

    Example:
        whole = lambda name: gathered(parameters[name], torch.bfloat16)
        for name, tensor in Gathering(spec, whole): ...
    """

    def __init__(self, spec: Model, whole: Whole) -> None:
        self.shapes = tensors(spec)
        self._left = iter(self.shapes)
        self._whole = whole

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._left:
            yield name, self._whole(name)

    def close(self) -> None:
        """Gathers the remaining tensors, to keep in step with the other ranks."""
        for _ in self:
            pass


def write(spec: Model, whole: Whole, directory: Path | str, *, dtype: str, source: Path | str, rank_mesh: RankMesh) -> None:
    """Writes a directory that transformers and SGLang load, on rank 0; the others gather with it.

    Args:
      whole: gathers a tensor by name.
      dtype: stored dtype: "float32", "bfloat16", "float16".
      source: directory that the model came from; its config.json, generation_config.json and
        tokenizer files are copied.

    Raises:
      UserError: the disk is full or not writable; on every rank.
    """
    with contextlib.closing(Gathering(spec, whole)) as gathering:
        error: UserError | None = None
        if rank_mesh.rank == 0:
            try:
                _write(gathering, spec, Path(directory), Path(source), dtype)
            except UserError as caught:
                error = caught
    failed = rank_mesh.reduce(torch.tensor(float(error is not None), device=rank_mesh.device), MAX)
    if error is not None:
        raise error
    if failed:
        raise UserError(f"{directory}: can't be written (rank 0 reports why)")


def _write(gathering: Gathering, spec: Model, directory: Path, source: Path, dtype: str) -> None:
    write_companions(directory, spec, dtype, source)
    found = iter(gathering)

    def read(name: str) -> np.ndarray:
        gathered_name, tensor = next(found)
        if gathered_name != name:
            raise RuntimeError(f"{gathered_name} was gathered, but {name} is written next")
        return to_numpy(tensor)

    write_model(directory, spec, read, dtype, source)
