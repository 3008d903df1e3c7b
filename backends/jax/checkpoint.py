"""Trees of arrays on disk by orbax: sharded, restored onto any mesh, checked before anything is replaced.

    DIRECTORY/meta.json   what the tree is (the caller's words), and size and CRC-32 of every file of it
    DIRECTORY/tree/       orbax

Neither function makes anything atomic: write into a directory that is renamed when it is whole (`rljax/checkpoints.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from rljax.backends.jax.hosts import together
from rljax.checksums import check_room, reason, verify, write_meta
from rljax.errors import UserError

Tree = Any  # nested dicts of arrays


def save_tree(directory: Path, tree: Tree, meta: Mapping[str, Any]) -> None:
    """Writes the tree under `directory`, which need not exist. Raises UserError when the disk is full or can't be written."""
    directory = directory.absolute()
    try:
        together(lambda: _prepare(directory, tree))
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(directory / "tree", args=ocp.args.StandardSave(tree), force=True)
        together(lambda: write_meta(directory, meta), first=True)
    except (OSError, ValueError) as error:  # tensorstore reports a full disk as a ValueError
        raise UserError(f"checkpoint: could not write {directory}: {reason(error)}") from error


def _prepare(directory: Path, tree: Tree) -> None:
    """Asks for room first: a disk that fills up under tensorstore's threads makes each of them print a traceback."""
    directory.mkdir(parents=True, exist_ok=True)
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    check_room(
        directory, sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.replica_id == 0)
    )


def restore_tree(directory: Path, like: Tree) -> Tree:
    """Reads the tree into the shapes, dtypes and shardings of `like` (arrays or ShapeDtypeStructs), whatever mesh wrote it.

    Raises UserError when a file is missing or changed, or the tree is another one.
    """
    directory = directory.absolute()
    together(lambda: verify(directory), first=True)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
    try:
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            _compare(directory, reader.metadata(directory / "tree").item_metadata.tree, abstract)
            return reader.restore(directory / "tree", args=ocp.args.StandardRestore(abstract))
    except UserError:
        raise
    except Exception as error:  # orbax and tensorstore raise a dozen kinds on files that can't be parsed
        raise UserError(f"checkpoint: {directory} can't be restored: {reason(error)} (name an older checkpoint)") from error


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
    """Orbax logs the traceback of every thread that failed; the caller raises the error itself, as one line."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
