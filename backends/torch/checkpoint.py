"""Named tensors on disk by torch.distributed.checkpoint: restored onto any layout, checked before
anything is replaced.

    DIRECTORY/meta.json   what it is of (the caller's words), and size and CRC-32 of every file
    DIRECTORY/tree/       DCP

Functions that take a layout are called by all ranks at once, and raise on all of them or on none.
None makes anything atomic: write into a directory that is renamed when it is whole
(`rljax/checkpoints/store.py`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from rljax.backends.torch.export import to_numpy
from rljax.backends.torch.mesh import MAX, Layout
from rljax.checkpoints.disk import check_room, reason
from rljax.checkpoints.integrity import TREE, read_meta, verify, write_meta
from rljax.errors import UserError

Result = TypeVar("Result")
Tensors = dict[str, Tensor]  # DTensors, or plain tensors that are the same on every rank


def save(directory: Path, tensors: Tensors, meta: Mapping[str, Any], layout: Layout) -> None:
    """Writes under `directory`, which need not exist.

    Raises UserError when the disk is full or can't be written.
    """
    directory = directory.absolute()

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        check_room(directory, sum(t.numel() * t.element_size() for t in tensors.values()))

    what = f"could not write {directory}"
    together(layout, what, prepare)
    with _quiet():  # torch.save hides why a write failed behind positions that don't agree
        writing = "is the disk full?"
        together(layout, what, lambda: state_dict_saver.save(tensors, checkpoint_id=directory / TREE), remedy=writing)
    together(layout, what, lambda: write_meta(directory, meta), first=True)


def restore(directory: Path, tensors: Tensors, layout: Layout) -> None:
    """Reads into the tensors, whatever layout wrote them. They may hold anything when it fails.

    Raises UserError when a file is missing or changed, or the checkpoint is of another run.
    """
    directory = directory.absolute()
    what, remedy = f"{directory} can't be restored", "name an older checkpoint"
    together(layout, what, lambda: verify(directory), first=True)
    with _quiet():
        together(layout, what, lambda: _compare(directory, tensors), remedy=remedy)
        together(layout, what, lambda: state_dict_loader.load(tensors, checkpoint_id=directory / TREE), remedy=remedy)


def meta_of(directory: Path, layout: Layout) -> dict[str, Any]:
    """meta.json, as rank 0 reads it."""
    found: list[Any] = [None]

    def read() -> None:
        found[0] = read_meta(directory)

    together(layout, f"{directory} can't be read", read, first=True)
    if layout.pool.size > 1:
        dist.broadcast_object_list(found, 0, device=layout.device)
    meta: dict[str, Any] = found[0]
    return meta


def stored_names(directory: Path) -> list[str]:
    """Of the tensors of a checkpoint. In this process alone; files are not verified."""
    with _alone(directory):
        return list(_stored(directory))


def read_host(directory: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Whole tensors, in the dtypes they were written in.

    In this process alone, on the host; files are not verified.
    """
    with _alone(directory), _quiet():
        stored = _stored(directory)
        tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        state_dict_loader.load(tensors, checkpoint_id=directory.absolute() / TREE, no_dist=True)
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Whatever is raised comes out as UserError."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # DCP wraps whatever its storage or unpickling raised
        why = reason(_cause(error))
        raise UserError(f"checkpoint: {directory} can't be restored: {why} (name an older checkpoint)") from error


def _stored(directory: Path) -> dict[str, Any]:
    """Sizes and dtypes of what is there."""
    stored: dict[str, Any] = filesystem.FileSystemReader(directory.absolute() / TREE).read_metadata().state_dict_metadata
    return stored


def _compare(directory: Path, tensors: Tensors) -> None:
    """Names the first tensor that differs in presence or shape."""
    stored = _stored(directory)
    have = {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
    want = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise UserError(
                f"checkpoint: {directory} is of another run: {name} is {have.get(name, 'absent')} there and "
                f"{want.get(name, 'absent')} here (use the config it was written with)"
            )


def together(
    layout: Layout, what: str, action: Callable[[], Result], *, first: bool = False, remedy: str = ""
) -> Result | None:
    """Runs on all ranks (or the first alone, None on the others); where it fails on one, raises
    UserError on all.
    """
    error: Exception | None = None
    result: Result | None = None
    if not first or layout.rank == 0:
        try:
            result = action()
        except UserError as caught:
            error = caught
        except (Exception, CheckpointException) as caught:  # whatever a rank's storage or unpickling raised, as DCP wraps it
            error = UserError(f"checkpoint: {what}: {reason(_cause(caught))}" + (f" ({remedy})" if remedy else ""))
            error.__cause__ = caught
    failed = layout.reduce(torch.tensor(float(error is not None), device=layout.device), MAX)
    if error is not None:
        raise error
    if failed:
        raise UserError(f"checkpoint: {what}: another rank says why")
    return result


def _cause(error: BaseException) -> Exception:
    """What a rank raised, out of DCP's CheckpointException."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns of how it is used on one process, and logs what the caller raises itself."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def empty_like(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors to read into."""
    return {name: torch.empty_like(t) for name, t in tensors.items()}


def shard_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
