"""What tells a whole checkpoint from a broken one: size and CRC-32 of every file of it, beside what it is of.

DIRECTORY/meta.json   what is in it (the caller's words), and the checksums
DIRECTORY/tree/       the arrays, as a framework's library writes them
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljax.errors import UserError

META, TREE = "meta.json", "tree"
_CHUNK = 1 << 24  # bytes read at once


def write_meta(directory: Path, meta: Mapping[str, Any]) -> None:
    """Writes meta.json over the files that are under `tree` now."""
    (directory / META).write_text(json.dumps({**meta, "files": file_checksums(directory / TREE)}, indent=1, sort_keys=True))


def check_room(directory: Path, needed: int) -> None:
    """Before anything is written: raises OSError where fewer than `needed` bytes are free."""
    if needed > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {needed / 1e6:.0f} MB")


def read_meta(directory: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Raises UserError when there is none, or it can't be read."""
    path = directory / META
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"checkpoint: {directory} holds none (no meta.json; name another, or start in a new directory)"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint: {path} can't be read: {reason(error)} (name an older checkpoint)") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict):
        raise UserError(f"checkpoint: {path} is not a checkpoint's meta.json (name another checkpoint)")
    return meta


def file_checksums(root: Path) -> dict[str, list[int]]:
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


def verify(directory: Path) -> None:
    """Raises UserError where a file is missing or isn't what was written."""
    for name, (size, crc) in read_meta(directory)["files"].items():
        path = directory / TREE / name
        if not path.is_file():
            raise UserError(f"checkpoint: {path} is missing (name an older checkpoint)")
        if path.stat().st_size != size or _crc(path) != crc:
            raise UserError(
                f"checkpoint: {path} is corrupt: its checksum is not the one it was written with (name an older one)"
            )


def reason(error: Exception) -> str:
    """One line of an error; the system's own words for a full disk come out of a library's long message."""
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
