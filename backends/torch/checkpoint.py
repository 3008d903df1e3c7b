"""Named tensors on disk by torch.distributed.checkpoint: restored onto any layout, checked before anything is replaced.

    DIRECTORY/meta.json   what it is of (the caller's words), and size and CRC-32 of every file
    DIRECTORY/tree/       DCP

Every function is called by all ranks at once, and raises on all of them or on none. None makes anything atomic: write into
a directory that is renamed when it is whole (`rljax/checkpoints.py`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.tensor import DTensor

from rljax.backends.torch.layout import MAX, Layout
from rljax.checksums import check_room, read_meta, reason, verify, write_meta
from rljax.errors import UserError

Tensors = dict[str, Tensor]  # DTensors, or plain tensors that are the same on every rank


def save(directory: Path, tensors: Tensors, meta: Mapping[str, Any], layout: Layout) -> None:
    """Writes under `directory`, which need not exist. Raises UserError when the disk is full or can't be written."""
    directory = directory.absolute()

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        check_room(directory, sum(t.numel() * t.element_size() for t in tensors.values()))

    _together(layout, f"could not write {directory}", prepare)
    with _quiet():
        _together(
            layout, f"could not write {directory}", lambda: state_dict_saver.save(tensors, checkpoint_id=directory / "tree")
        )
    _together(layout, f"could not write {directory}", lambda: write_meta(directory, meta), first=True)


def restore(directory: Path, tensors: Tensors, layout: Layout) -> None:
    """Reads into the tensors, whatever layout wrote them. They may hold anything when it fails.

    Raises UserError when a file is missing or changed, or the checkpoint is of another run.
    """
    directory = directory.absolute()
    what = f"{directory} can't be restored"
    _together(layout, what, lambda: verify(directory), first=True)
    with _quiet():
        _together(layout, what, lambda: _compare(directory, tensors))
        _together(layout, what, lambda: state_dict_loader.load(tensors, checkpoint_id=directory / "tree"))


def meta_of(directory: Path, layout: Layout) -> dict[str, Any]:
    """meta.json, as rank 0 reads it."""
    found: list[Any] = [None]

    def read() -> None:
        found[0] = read_meta(directory)

    _together(layout, f"{directory} can't be read", read, first=True)
    if layout.pool.size > 1:
        dist.broadcast_object_list(found, 0, device=layout.device)
    meta: dict[str, Any] = found[0]
    return meta


def _compare(directory: Path, tensors: Tensors) -> None:
    """Names the first tensor that differs in presence or shape."""
    stored = filesystem.FileSystemReader(directory / "tree").read_metadata().state_dict_metadata
    have = {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
    want = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise UserError(
                f"checkpoint: {directory} is of another run: {name} is {have.get(name, 'absent')} there and "
                f"{want.get(name, 'absent')} here (use the config it was written with)"
            )


def _together(layout: Layout, what: str, action: Callable[[], Any], *, first: bool = False) -> None:
    """Runs on all ranks (or the first alone); where it fails on one, raises UserError on all."""
    error: Exception | None = None
    if not first or layout.rank == 0:
        try:
            action()
        except UserError as caught:
            error = caught
        except Exception as caught:  # DCP wraps whatever a rank's storage or unpickling raised
            error = UserError(f"checkpoint: {what}: {reason(_cause(caught))} (is the disk full? name an older checkpoint?)")
            error.__cause__ = caught
    failed = layout.reduce(torch.tensor(float(error is not None), device=layout.device), MAX)
    if error is not None:
        raise error
    if failed:
        raise UserError(f"checkpoint: {what}: another rank says why")


def _cause(error: Exception) -> Exception:
    """What a rank raised, out of DCP's CheckpointException."""
    failures = getattr(error, "failures", None)
    return next((f[0] for f in failures.values()), error) if failures else error


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
