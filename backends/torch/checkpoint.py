"""Checkpoints of named tensors by torch.distributed.checkpoint (DCP), for any number of ranks.

    DIRECTORY/meta.json   the caller's description, and size and CRC-32 of every file
    DIRECTORY/tree/       DCP

Everything is checked before anything is replaced, and nothing that files say is run
(checkpoint_reader.py). Functions with a `rank_mesh` are called by all
ranks at once, and raise on all of them or on none. Writing is not atomic: write to a directory that
is renamed when it is complete (`rljax/checkpoints/store.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from rljax.backends.torch.checkpoint_reader import CheckpointReader, read_metadata
from rljax.backends.torch.export import to_numpy
from rljax.backends.torch.mesh import MAX, RankMesh
from rljax.checkpoints.background import BackgroundWrite, in_thread, silenced
from rljax.checkpoints.disk import check_room, reason
from rljax.checkpoints.integrity import TREE, read_meta, verify, write_meta
from rljax.errors import UserError

Result = TypeVar("Result")
LOGGER = "torch.distributed.checkpoint"
Remedy = Callable[[Exception], str]  # what the user can do about an error; "" if that isn't known
Tensors = dict[str, Tensor]  # DTensors, or plain tensors that are the same on every rank


def save(directory: Path, tensors: Tensors, meta: Mapping[str, Any], rank_mesh: RankMesh) -> None:
    """Writes a checkpoint to `directory`, which may not exist yet.

    Raises UserError if the disk is full or not writable.
    """
    directory = directory.absolute()
    what = f"could not write {directory}"
    needed = sum(t.numel() * t.element_size() for t in tensors.values())
    on_all_ranks(rank_mesh, what, lambda: _prepare(directory, needed))
    with _quiet():
        on_all_ranks(rank_mesh, what, lambda: state_dict_saver.save(tensors, checkpoint_id=directory / TREE), remedy=_of_write)
    on_all_ranks(rank_mesh, what, lambda: write_meta(directory, meta), first=True)


class Saves:
    """Saves of a learner beside its other calls, one at a time.

    On a GPU the first save allocates as much pinned memory on the host; it is kept for the next one
    until `close`.
    """

    def __init__(self, rank_mesh: RankMesh, group: dist.ProcessGroup, *, keep_memory: bool | None = None) -> None:
        """Creates it on all ranks.

        Args:
          rank_mesh: whose ranks have the tensors.
          group: all ranks, over the CPU, and used for nothing else: other calls of the learner use
            their own meanwhile.
          keep_memory: keep the host's copy for the next save. None: on GPUs.
        """
        self._rank_mesh, self._group = rank_mesh, group
        self._stream = torch.cuda.Stream(rank_mesh.device) if rank_mesh.device.type == "cuda" else None
        self._keep_memory = self._stream is not None if keep_memory is None else keep_memory
        self._stager: StateDictStager | None = None

    def begin(self, directory: Path, tensors: Callable[[], Tensors], needed: int, meta: Mapping[str, Any]) -> BackgroundWrite:
        """Writes a checkpoint as `save` does, in a thread; the one before must be written.

        `copied` is done when the tensors may change.

        Args:
          directory: may not exist yet.
          tensors: returns them, in the thread: hundreds of DTensors take a tenth of a second to
            make.
          needed: bytes of all ranks' tensors together.
          meta: the caller's description.

        Raises UserError, at once, if the disk is full or not writable.
        """
        directory = directory.absolute()
        what = f"could not write {directory}"
        on_all_ranks(self._rank_mesh, what, lambda: _prepare(directory, needed))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._rank_mesh.device))  # for what changed them last
        copied = Future[None]()

        def write() -> None:
            try:
                with silenced(LOGGER), _as_one_line(what, _of_write):
                    self._rank_mesh.set_device()  # of this thread
                    staged = self._stage(tensors())
                    copied.set_result(None)
                    state_dict_saver.save(staged, checkpoint_id=directory / TREE, process_group=self._group)
            finally:
                if not copied.done():
                    copied.set_result(None)
            if self._rank_mesh.rank == 0:
                with _as_one_line(what):
                    write_meta(directory, meta)

        return BackgroundWrite(copied, in_thread("save", write))

    def _stage(self, tensors: Tensors) -> Tensors:
        """Copies shards to the host, by a stream of their own.

        torch's `DefaultStager` frees its memory after every save, in 2.11.
        """
        stager = self._stager or StateDictStager(pin_memory=self._stream is not None)
        self._stager = stager if self._keep_memory else None
        with torch.cuda.stream(self._stream):  # of None: does nothing
            staged: Tensors = stager.stage(tensors, non_blocking=self._stream is not None)
        if self._stream is not None:
            self._stream.synchronize()
        return staged

    def close(self) -> None:
        """Frees the host's memory. The last save must be written."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def _of_write(error: Exception) -> str:
    """Returns the remedy for a failed write. torch.save reports one as positions that don't match."""
    return "is the disk full?" if "unexpected pos" in str(error) else ""


def _of_read(error: Exception) -> str:
    return "name an older checkpoint"


def _no_remedy(error: Exception) -> str:
    return ""


def _prepare(directory: Path, needed: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    check_room(directory, needed)


def restore(directory: Path, tensors: Tensors, rank_mesh: RankMesh) -> None:
    """Reads into the tensors, which may be sharded in any way.

    Raises UserError if a file is missing or changed, or the checkpoint is of another run. The
    contents of the tensors are undefined then.
    """
    directory = directory.absolute()
    what = f"{directory} can't be restored"
    reader = CheckpointReader(directory / TREE)
    on_all_ranks(rank_mesh, what, lambda: verify(directory), first=True)
    with _quiet():
        on_all_ranks(rank_mesh, what, lambda: _compare(directory, tensors), remedy=_of_read)
        on_all_ranks(
            rank_mesh,
            what,
            lambda: state_dict_loader.load(tensors, storage_reader=reader),
            remedy=_of_read,
        )


def meta_of(directory: Path, rank_mesh: RankMesh) -> dict[str, Any]:
    """Returns meta.json, as rank 0 reads it."""
    found: list[Any] = [None]

    def read() -> None:
        found[0] = read_meta(directory)

    on_all_ranks(rank_mesh, f"{directory} can't be read", read, first=True)
    if rank_mesh.pool.size > 1:
        dist.broadcast_object_list(found, 0, device=rank_mesh.device)
    meta: dict[str, Any] = found[0]
    return meta


def stored_names(directory: Path) -> list[str]:
    """Lists the tensors of a checkpoint. In this process alone; files are not verified."""
    with _as_user_error(directory):
        return list(_stored(directory))


def read_host(directory: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Reads whole tensors to the host, in the dtypes they were written in.

    In this process alone; files are not verified.
    """
    with _as_user_error(directory), _quiet():
        stored = _stored(directory)
        tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
        state_dict_loader.load(tensors, storage_reader=CheckpointReader(directory.absolute() / TREE), no_dist=True)
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}


@contextmanager
def _as_user_error(directory: Path) -> Iterator[None]:
    """Turns any error into a UserError."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # DCP wraps what its storage or unpickling raised
        why = reason(_cause(error))
        raise UserError(f"checkpoint: {directory} can't be restored: {why} (name an older checkpoint)") from error


def _stored(directory: Path) -> dict[str, Any]:
    """Reads the sizes and dtypes of the stored tensors."""
    stored: dict[str, Any] = read_metadata(directory.absolute() / TREE).state_dict_metadata
    return stored


def _compare(directory: Path, tensors: Tensors) -> None:
    """Raises UserError that names the first tensor that differs in presence or shape."""
    stored = _stored(directory)
    have = {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
    want = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise UserError(
                f"checkpoint: {directory} is of another run: {name} is {have.get(name, 'absent')} there and "
                f"{want.get(name, 'absent')} here (use the config it was written with)"
            )


def on_all_ranks(
    rank_mesh: RankMesh, what: str, action: Callable[[], Result], *, first: bool = False, remedy: Remedy = _no_remedy
) -> Result | None:
    """Runs an action on all ranks; if it fails on one, raises UserError on all.

    A rank that a signal stops raises that, once the others know.

    Args:
      what: what could not be done, for the message.
      first: run it on rank 0 only; the others get None.
      remedy: of the error that a rank raised.
    """
    error: BaseException | None = None
    result: Result | None = None
    if not first or rank_mesh.rank == 0:
        try:
            with _as_one_line(what, remedy):
                result = action()
        except (UserError, KeyboardInterrupt) as caught:
            error = caught
    failed = rank_mesh.reduce(torch.tensor(float(error is not None), device=rank_mesh.device), MAX)
    if error is not None:
        raise error
    if failed:
        raise UserError(f"checkpoint: {what}: another rank reports why")
    return result


@contextmanager
def _as_one_line(what: str, remedy: Remedy = _no_remedy) -> Iterator[None]:
    """Turns any error into a UserError that says what could not be done."""
    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # DCP wraps what a rank's storage or unpickling raised
        cause = _cause(error)
        hint = remedy(cause)
        raise UserError(f"checkpoint: {what}: {reason(cause)}" + (f" ({hint})" if hint else "")) from error


def _cause(error: BaseException) -> Exception:
    """Extracts what a rank raised from DCP's CheckpointException.

    A signal that stopped the rank is raised as it is: nothing is wrong with the files.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, KeyboardInterrupt):
        raise error from None
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences DCP's warnings about a single process, and its log of errors that the caller raises."""
    with silenced(LOGGER), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def empty_like(tensors: Mapping[str, Tensor]) -> Tensors:
    """Allocates tensors to read into."""
    return {name: torch.empty_like(t) for name, t in tensors.items()}


def shard_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
