"""Trees of arrays on disk by orbax: sharded, restored onto any mesh, checked before anything is replaced.

    DIRECTORY/meta.json   what the tree is (the caller's words), and size and CRC-32 of every file of it
    DIRECTORY/tree/       orbax

Neither function makes anything atomic: write into a directory that is renamed when it is whole (`rljax/checkpoints.py`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from rljax.errors import UserError

Tree = Any  # nested dicts of arrays
_CHUNK = 1 << 24  # bytes read at once


def save_tree(directory: Path, tree: Tree, meta: Mapping[str, Any]) -> None:
    """Writes the tree under `directory`, which need not exist. Raises UserError when the disk is full or can't be written."""
    directory = directory.absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _check_room(directory, tree)
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
            writer.save(directory / "tree", args=ocp.args.StandardSave(tree), force=True)
        if jax.process_index() == 0:
            text = json.dumps({**meta, "files": _checksums(directory / "tree")}, indent=1, sort_keys=True)
            (directory / "meta.json").write_text(text)
    except (OSError, ValueError) as error:  # tensorstore reports a full disk as a ValueError
        raise UserError(f"checkpoint: could not write {directory}: {_reason(error)}") from error


def _check_room(directory: Path, tree: Tree) -> None:
    """Before anything is written: a disk that fills up under tensorstore's threads makes each of them print a traceback."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    needed = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.replica_id == 0)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {needed / 1e6:.0f} MB")


def read_meta(directory: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Raises UserError when there is none, or it can't be read."""
    path = directory / "meta.json"
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"checkpoint: {directory} holds none (no meta.json; name another, or start in a new directory)"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint: {path} can't be read: {_reason(error)} (name an older checkpoint)") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict):
        raise UserError(f"checkpoint: {path} is not a checkpoint's meta.json (name another checkpoint)")
    return meta


def restore_tree(directory: Path, like: Tree) -> Tree:
    """Reads the tree into the shapes, dtypes and shardings of `like` (arrays or ShapeDtypeStructs), whatever mesh wrote it.

    Raises UserError when a file is missing or changed, or the tree is another one.
    """
    directory = directory.absolute()
    _verify(directory)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
    try:
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            _compare(directory, reader.metadata(directory / "tree").item_metadata.tree, abstract)
            return reader.restore(directory / "tree", args=ocp.args.StandardRestore(abstract))
    except UserError:
        raise
    except Exception as error:  # orbax and tensorstore raise a dozen kinds on files that can't be parsed
        raise UserError(f"checkpoint: {directory} can't be restored: {_reason(error)} (name an older checkpoint)") from error


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


def _checksums(root: Path) -> dict[str, list[int]]:
    """{path below root: [bytes, CRC-32]}"""
    return {
        str(path.relative_to(root)): [path.stat().st_size, _crc(path)] for path in sorted(root.rglob("*")) if path.is_file()
    }


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _verify(directory: Path) -> None:
    for name, (size, crc) in read_meta(directory)["files"].items():
        path = directory / "tree" / name
        if not path.is_file():
            raise UserError(f"checkpoint: {path} is missing (name an older checkpoint)")
        if path.stat().st_size != size or _crc(path) != crc:
            raise UserError(
                f"checkpoint: {path} is corrupt: its checksum is not the one it was written with (name an older one)"
            )


def _reason(error: Exception) -> str:
    """One line of an error; the system's own words for a full disk come out of tensorstore's long message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    for words in (
        "No space left on device",
        "File too large",
        "Disk quota exceeded",
        "Permission denied",
        "Read-only file system",
    ):
        if words in text:
            return words
    return text[:200] or type(error).__name__


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
