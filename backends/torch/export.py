"""Whole tensors out of sharded parameters, one at a time, in HF's names: to a directory, or to
whoever iterates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rljax.backends.torch.mesh import MAX, Layout, like, local
from rljax.errors import UserError
from rljax.hf.companion_files import write_companions
from rljax.hf.spec import ModelSpec
from rljax.hf.tensors import tensors
from rljax.hf.weights import write_weights

Whole = Callable[[str], Tensor]


def gathered(parameter: DTensor, dtype: torch.dtype) -> Tensor:
    """The whole parameter, on every rank.

    A collective, unless all have all of it; then it may share the parameter's memory.
    """
    shard = local(parameter).to(dtype)
    alike = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    if all(size == 1 or placement.is_replicate() for size, placement in alike):
        return shard
    return like(parameter, shard).full_tensor()


def to_numpy(tensor: Tensor) -> np.ndarray:
    """On the host, in the same dtype."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


class Gathering:
    """All tensors of a model by name, in order, gathered as they are asked for: a collective each.

    Every rank iterates over its own. A rank that stops early leaves the others waiting: `close`
    gathers what is left.

    Example: for name, tensor in Gathering(spec, lambda name: gathered(parameters[name],
    torch.bfloat16)): ...
    """

    def __init__(self, spec: ModelSpec, whole: Whole) -> None:
        self.shapes = tensors(spec)
        self._left = iter(self.shapes)
        self._whole = whole

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._left:
            yield name, self._whole(name)

    def close(self) -> None:
        """Keeps in step with the other ranks; nothing where all was taken."""
        for _ in self:
            pass


def write(spec: ModelSpec, whole: Whole, directory: Path | str, *, dtype: str, source: Path | str, layout: Layout) -> None:
    """Rank 0 writes a directory that transformers and SGLang load; the others gather with it.

    Args:
      whole: gathers a tensor by name.
      dtype: stored: "float32", "bfloat16", "float16".
      source: the directory the model came from: its config.json, generation_config.json and
        tokenizer files are taken over.

    Raises:
      UserError: the disk is full or not writable; on every rank.
    """
    with contextlib.closing(Gathering(spec, whole)) as gathering:
        error: UserError | None = None
        if layout.rank == 0:
            try:
                _write(gathering, spec, Path(directory), Path(source), dtype)
            except UserError as caught:
                error = caught
    failed = layout.reduce(torch.tensor(float(error is not None), device=layout.device), MAX)
    if error is not None:
        raise error
    if failed:
        raise UserError(f"{directory}: cannot be written (rank 0 says why)")


def _write(gathering: Gathering, spec: ModelSpec, directory: Path, source: Path, dtype: str) -> None:
    write_companions(directory, spec, dtype, source)
    found = iter(gathering)

    def read(name: str) -> np.ndarray:
        there, tensor = next(found)
        if there != name:
            raise RuntimeError(f"{there} was gathered, and {name} is to be written")
        return to_numpy(tensor)

    write_weights(directory, gathering.shapes, read, dtype)
