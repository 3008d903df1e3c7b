"""Trees of arrays on disk by orbax: sharded, restored onto any mesh, checked before anything is
replaced.

    DIRECTORY/meta.json   what the tree is (the caller's words); size and CRC-32 of each file
    DIRECTORY/tree/       orbax

Neither function makes anything atomic: write into a directory that is renamed when it is whole
(`rljax/checkpoints/store.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rljax.backends.jax.multihost import together
from rljax.checkpoints.disk import check_room, reason
from rljax.checkpoints.integrity import verify, write_meta
from rljax.errors import UserError

Tree = Any  # nested dicts of arrays


def save_tree(directory: Path, tree: Tree, meta: Mapping[str, Any]) -> None:
    """Writes the tree under `directory`, which need not exist.

    Raises UserError when the disk is full or can't be written.
    """
    directory = directory.absolute()
    try:
        together(lambda: _prepare(directory, tree))
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(directory / "tree", args=ocp.args.StandardSave(tree), force=True)
        together(lambda: write_meta(directory, meta), first=True)
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
        with _quiet(), ocp.Checkpointer(handler) as reader:
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs the traceback of every thread that failed; the caller raises the error itself, as
    one line.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
