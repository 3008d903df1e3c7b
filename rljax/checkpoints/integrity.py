"""Integrity of checkpoints: size and CRC-32 per file, recorded once and checked once before use.

CHECKPOINT/manifest.json        records of all files, except those that a meta.json records
          /learner/meta.json    the learner's own description, and records of the files under tree/
          /learner/tree/        arrays, as a framework's library writes them

A learner's directory records its own arrays, so that it can be verified wherever it is moved;
readers call `verify` first. The manifest covers the other files, and is checked before anything
else is read (store.py). A checkpoint is intact if both checks pass, and no byte is read twice for
them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rljax import json_fields
from rljax.checkpoints.disk import reason
from rljax.errors import UserError

META, TREE = "meta.json", "tree"
MANIFEST = "manifest.json"
_MANIFEST: json_fields.Schema = {
    "step": json_fields.integer(0, 2**62),
    "score": json_fields.number(-1e300, 1e300),
    "files": json_fields.RECORDS,
}
_ASIDE = f".{MANIFEST}.part"  # a kill may leave it
_CHUNK = 1 << 24  # bytes read at once

Records = Mapping[str, tuple[int, int]]  # size in bytes and CRC-32, by path relative to a directory


class Corrupt(Exception):
    """A file is missing, was changed or is not listed. Its message is one line."""


# Any files --------------------------------------------------------------------------------------------------------------


def record(root: Path, paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Reads the files. Returns their sizes and checksums, by path relative to root."""
    return {path.relative_to(root).as_posix(): (path.stat().st_size, _checksum(path)) for path in sorted(paths)}


def check(root: Path, records: Records) -> None:
    """Raises Corrupt at the first file that is missing or differs from what was recorded."""
    for name, (size, checksum) in records.items():
        path = root / name
        if not path.is_file():
            raise Corrupt(f"{path} is missing")
        if path.stat().st_size != size:
            raise Corrupt(f"{path} is corrupt: it has {path.stat().st_size} bytes, not {size}")
        if _checksum(path) != checksum:
            raise Corrupt(f"{path} is corrupt: its checksum is not the one it was written with")


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def files_below(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


# A learner's directory --------------------------------------------------------------------------------------------------


def write_meta(directory: Path, meta: Mapping[str, Any]) -> None:
    """Writes meta.json of a learner's directory, with sizes and checksums of the files under tree/.

    A checkpoint's manifest leaves those files out, so readers must call `verify` first.
    """
    files = record(directory / TREE, files_below(directory / TREE))
    (directory / META).write_text(json.dumps({**meta, "files": files}, indent=1, sort_keys=True))


def read_meta(directory: Path) -> dict[str, Any]:
    """Reads meta.json of a learner's directory.

    Raises:
      UserError: there is no meta.json, or it can't be read.
    """
    path = directory / META
    try:
        meta = json_fields.read_object(path, {"files": json_fields.RECORDS})
    except FileNotFoundError:
        raise UserError(
            f"checkpoint: {directory} has no meta.json, so it is not a checkpoint (name another, or start in a new directory)"
        ) from None
    except UserError as error:
        raise UserError(f"checkpoint: {error}") from None
    if not isinstance(meta.get("files"), dict):
        raise UserError(f"checkpoint: {path} is not a checkpoint's meta.json (name another checkpoint)")
    return meta


def verify(directory: Path) -> None:
    """Checks the arrays of a learner's directory.

    Raises:
      UserError: a file is missing, was changed, or is one that meta.json does not list.
    """
    try:
        records = read_meta(directory)["files"]
        check(directory / TREE, records)
        _check_listed(files_below(directory / TREE) - {directory / TREE / name for name in records}, META)
    except Corrupt as error:
        raise UserError(f"checkpoint: {error}") from None


# A checkpoint -----------------------------------------------------------------------------------------------------------


def write_manifest(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes manifest.json: the facts, and all files that no meta.json records."""
    files = record(directory, _to_list(directory))
    (directory / MANIFEST).write_text(json.dumps({**facts, "files": files}))


def check_whole(directory: Path) -> dict[str, Any]:
    """Checks the files that the manifest lists, and that it lists all that no meta.json records.

    Returns the manifest as `read_manifest` does. Raises Corrupt.
    """
    manifest = read_manifest(directory)
    check(directory, manifest["files"])
    _check_listed(_to_list(directory) - {directory / name for name in manifest["files"]}, MANIFEST)
    return manifest


def _check_listed(others: set[Path], where: str) -> None:
    """Raises Corrupt if there are other files than those listed: nothing says what they held."""
    if others:
        raise Corrupt(f"{min(others)} is not listed in {where}")


def _to_list(directory: Path) -> set[Path]:
    """Returns the files of a checkpoint that its manifest has to list."""
    recorded = {file for path in directory.rglob(META) for file in _recorded(path.parent)}
    return files_below(directory) - recorded - {directory / MANIFEST, directory / _ASIDE}


def rescore(directory: Path, score: float) -> None:
    """Replaces the score in manifest.json; a reader sees the old one or the new.

    Raises Corrupt if there is no manifest.
    """
    aside = directory / _ASIDE
    aside.write_text(json.dumps(read_manifest(directory) | {"score": score}))
    os.replace(aside, directory / MANIFEST)


def _recorded(directory: Path) -> set[Path]:
    """Returns the files that a meta.json records; none if it is not a learner's meta.json."""
    try:
        return {directory / TREE / name for name in read_meta(directory)["files"]}
    except UserError:
        return set()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads manifest.json. Raises Corrupt if it is missing or can't be read."""
    try:
        manifest = json_fields.read_object(directory / MANIFEST, _MANIFEST, needed=("files", "step"))
    except FileNotFoundError as error:
        raise Corrupt(f"{directory / MANIFEST} can't be read: {reason(error)}") from error
    except UserError as error:
        path = directory / MANIFEST
        raise Corrupt(f"{path} can't be read: {str(error).removeprefix(f'{path}: ')}") from None
    files = {name: (size, checksum) for name, (size, checksum) in manifest["files"].items()}
    return {"step": manifest["step"], "score": manifest.get("score"), "files": files}
