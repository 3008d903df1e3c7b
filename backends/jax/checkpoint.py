"""Trees of arrays on disk by orbax: sharded, restored onto any mesh, checked before anything is
replaced.

    DIRECTORY/meta.json   what the tree is (the caller's words); size and CRC-32 of each file
    DIRECTORY/tree/       orbax

Neither function makes anything atomic: write into a directory that is renamed when it is whole
(`rljax/checkpoints/store.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rljax.backends.jax.multihost import together
from rljax.checkpoints.background import BackgroundWrite, in_thread, silenced
from rljax.checkpoints.disk import check_room, reason
from rljax.checkpoints.integrity import verify, write_meta
from rljax.errors import UserError

Tree = Any  # nested dicts of arrays
LOGGER = "absl"  # where orbax logs the traceback of every thread that failed; the caller raises the error as one line
TIMEOUT = 1800.0  # seconds

_saves = itertools.count()  # begun so far: the same in all processes, which save in the same order


def save_tree(directory: Path, tree: Tree, meta: Mapping[str, Any]) -> None:
    """Writes the tree under `directory`, which need not exist.

    Raises UserError when the disk is full or can't be written.
    """
    written = begin_save(directory, tree, meta).written
    together(written.result)


def begin_save(directory: Path, tree: Tree, meta: Mapping[str, Any], timeout: float = TIMEOUT) -> BackgroundWrite:
    """Writes the tree as `save_tree` does, in a thread.

    `copied` is done when all arrays are on the host: donate none of them before. On CPU devices
    that takes no copy: JAX gives no array's memory to another while the host has a view of it.

    Args:
      timeout: seconds that a process waits for the others to have written.
    """
    directory, number, copied = directory.absolute(), next(_saves), Future[None]()
    with _writing(directory):
        together(lambda: _prepare(directory, tree))

    def write() -> None:
        try:
            with _writing(directory), silenced(LOGGER), _writer(number, timeout) as writer:
                writer.save(directory / "tree", args=ocp.args.StandardSave(tree), force=True)
                copied.set_result(None)
                writer.wait_until_finished()
                if jax.process_index() == 0:
                    write_meta(directory, meta)
        finally:
            if not copied.done():
                copied.set_result(None)

    return BackgroundWrite(copied, in_thread("save", write))


def _writer(number: int, timeout: float) -> ocp.AsyncCheckpointer:
    """Returns a writer for a save. Its waits for other processes are no programs on their devices.

    Programs would have to be in the same order in every process, and this is another thread.
    """
    processes = set(range(jax.process_count())) if jax.process_count() > 1 else None
    options = ocp.options.MultiprocessingOptions(active_processes=processes, barrier_sync_key_prefix=f"save{number}")
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    return ocp.AsyncCheckpointer(handler, timeout_secs=int(timeout), multiprocessing_options=options)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turns errors of the disk into UserError."""
    try:
        yield
    except (OSError, ValueError) as error:  # tensorstore reports a full disk as a ValueError
        raise UserError(f"checkpoint: could not write {directory}: {reason(error)}") from error


def _prepare(directory: Path, tree: Tree) -> None:
    """Asks for room first: a disk that fills up under tensorstore's threads makes each of them
    print a traceback.
    """
    directory.mkdir(parents=True, exist_ok=True)
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    check_room(
        directory, sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.replica_id == 0)
    )


def restore_tree(directory: Path, like: Tree) -> Tree:
    """Reads the tree into the shapes, dtypes and shardings of `like` (arrays or
    ShapeDtypeStructs), whatever mesh wrote it.

    Raises UserError when a file is missing or changed, or the tree is another one.
    """
    directory = directory.absolute()
    together(lambda: verify(directory), first=True)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
    with _reading(directory, ocp.StandardCheckpointHandler()) as reader:
        _compare(directory, _stored(reader, directory), abstract)
        return reader.restore(directory / "tree", args=ocp.args.StandardRestore(abstract))


def read_host(directory: Path, path: Sequence[str]) -> Tree:
    """The part of the tree at a path, as numpy arrays in the dtypes they were written in. Files
    are not verified.

    Example: read_host(directory, ("rl", "actor", "mu"))
    """
    directory = directory.absolute()
    with _reading(directory, ocp.PyTreeCheckpointHandler()) as reader:
        stored = _at(_stored(reader, directory), path)
        wanted = _under(jax.tree.map(lambda a: np.empty(a.shape, a.dtype), stored), path)
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        restore = ocp.args.PyTreeRestore(item=wanted, restore_args=args, partial_restore=True)
        return _at(reader.restore(directory / "tree", args=restore), path)


def stored_paths(directory: Path) -> set[str]:
    """Lists the paths of a checkpoint's arrays, like "rl/actor/count"."""
    directory = directory.absolute()
    with _reading(directory, ocp.PyTreeCheckpointHandler()) as reader:
        return {_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(_stored(reader, directory))}


@contextlib.contextmanager
def _reading(directory: Path, handler: ocp.CheckpointHandler) -> Iterator[ocp.Checkpointer]:
    """A reader; whatever it raises comes out as UserError."""
    try:
        with silenced(LOGGER), ocp.Checkpointer(handler) as reader:
            yield reader
    except UserError:
        raise
    except Exception as error:  # orbax and tensorstore raise a dozen kinds on files that can't be parsed
        raise UserError(f"checkpoint: {directory} can't be restored: {reason(error)} (name an older checkpoint)") from error


def _stored(reader: ocp.Checkpointer, directory: Path) -> Tree:
    """Shapes and dtypes of what is there."""
    return reader.metadata(directory / "tree").item_metadata.tree


def _at(tree: Tree, path: Sequence[str]) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def _under(tree: Tree, path: Sequence[str]) -> Tree:
    for key in reversed(path):
        tree = {key: tree}
    return tree


def _compare(directory: Path, stored: Tree, wanted: Tree) -> None:
    """Names the first array that differs in presence or shape."""
    have = {_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(stored)}
    want = {_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise UserError(
                f"checkpoint: {directory} is of another run: {name} is {have.get(name, 'absent')} there and "
                f"{want.get(name, 'absent')} here (use the config it was written with)"
            )


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "key", key)) for key in path)
