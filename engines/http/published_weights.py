"""The weights published last, kept for servers that come back without them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class PublishedWeights:
    """A second name for the published directory, which its publisher removes after the publish:
    hard links, no copy.

    It takes memory (or disk) for one model more, from the removal until the next publish.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._version = -1
        self._count = 0  # a version may be published twice

    def prepare(self, directory: Path, version: int) -> Path:
        """A second name for a directory; `hold` it or remove it. Raises OSError."""
        self._count += 1
        new = directory.parent / f"held-{version}-{os.getpid()}-{self._count}"
        shutil.rmtree(new, ignore_errors=True)
        try:
            shutil.copytree(directory, new, copy_function=_link)
        except shutil.Error as error:
            shutil.rmtree(new, ignore_errors=True)
            raise OSError(f"{directory}: {error}") from error
        return new

    def hold(self, prepared: Path, version: int) -> None:
        """Instead of what was held before."""
        self.drop()
        self._directory, self._version = prepared, version

    def directory_of(self, version: int) -> str | None:
        """None where that version is not held, or was removed with the directory around it."""
        if self._directory is None or self._version != version or not self._directory.is_dir():
            return None
        return str(self._directory)

    def drop(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # no links there, or between there and what a symbolic link names
        shutil.copy2(source, target)
