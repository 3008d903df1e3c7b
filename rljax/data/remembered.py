"""Selections of large data sets, remembered by what decides them.

The second run need not measure.

They are files of `$XDG_CACHE_HOME/rljax/selections` (`~/.cache/rljax/selections`), which may be
deleted at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rljax import __version__

LEAST = 20_000  # examples of a data set that is remembered


@dataclasses.dataclass(frozen=True)
class Selected:
    """Outcome of a selection."""

    kept: np.ndarray  # [n] int64, rising: indices of the examples that are used
    long_prompts: int
    long_examples: int
    strange: tuple[tuple[int, str], ...]  # index, and a character without a token
    lengths: np.ndarray | None = None  # [n] int32: tokens of the prompts, where they were measured


class Memory:
    """The place of one selection.

    Example:

        memory = Memory({"data": digest, "max_length": 512})
        found = memory.recall() or memory.keep(select())
    """

    def __init__(self, decided_by: Mapping[str, Any]) -> None:
        """decided_by: JSON values; a selection is recalled for equal ones alone."""
        text = json.dumps({**decided_by, "rljax": __version__}, sort_keys=True)
        self._path = _folder() / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.npz"

    def recall(self) -> Selected | None:
        """Returns the selection; None if there is none, or it can't be read."""
        try:
            with np.load(self._path, allow_pickle=False) as arrays:
                rest = json.loads(str(arrays["rest"]))
                strange = tuple((int(index), str(character)) for index, character in rest["strange"])
                lengths = arrays["lengths"].astype(np.int32) if "lengths" in arrays else None
                return Selected(arrays["kept"].astype(np.int64), rest["long_prompts"], rest["long_examples"], strange, lengths)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, zipfile.BadZipFile):
            return None

    def keep(self, selected: Selected) -> Selected:
        """Remembers a selection, if there is a place for it, and returns it."""
        rest = {name: getattr(selected, name) for name in ("long_prompts", "long_examples", "strange")}
        temporary = self._path.with_suffix(f".{os.getpid()}.npz")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            arrays: dict[str, Any] = {"kept": selected.kept, "rest": np.array(json.dumps(rest))}
            if selected.lengths is not None:
                arrays["lengths"] = selected.lengths
            np.savez(temporary, **arrays)
            os.replace(temporary, self._path)
        return selected


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljax" / "selections"
