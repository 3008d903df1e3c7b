"""The last published weights, kept for servers that restart without them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class PublishedWeights:
    """A hard-linked copy of the published directory, whose original is removed after the publish.

    From that removal until the next publish it takes the memory (or disk) of one more model.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._version = -1
        self._count = 0  # distinguishes two publishes of one version

    def prepare(self, directory: Path, version: int) -> Path:
        """Hard-links a directory; pass the result to `keep` or remove it. Raises OSError."""
        self._count += 1
        new = directory.parent / f"held-{version}-{os.getpid()}-{self._count}"
        shutil.rmtree(new, ignore_errors=True)
        try:
            shutil.copytree(directory, new, copy_function=_link_or_copy)
        except shutil.Error as error:
            shutil.rmtree(new, ignore_errors=True)
            raise OSError(f"{directory}: {error}") from error
        return new

    def keep(self, prepared: Path, version: int) -> None:
        """Keeps a prepared directory in place of the previous one."""
        self.drop()
        self._directory, self._version = prepared, version

    def directory_of(self, version: int) -> str | None:
        """Returns the directory of a version, or None if it isn't kept or was removed."""
        if self._directory is None or self._version != version or not self._directory.is_dir():
            return None
        return str(self._directory)

    def drop(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # no hard links there, or the target is on another file system
        shutil.copy2(source, target)
