"""Configs of a run: config.json has that of the newest step, configs/ each one by its first step.

A config is written when a step is made with it. One that made none, as of a start that failed or
had nothing left to do, leaves no trace beside the log.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rljax.config import io as config_io
from rljax.config import resume
from rljax.config.schema import Config

FILE, FOLDER = "config.json", "configs"


class ConfigRecord:
    """Record of a run's configs.

    Example:

        record = ConfigRecord(workdir, config, write_text)  # checks the config against the run's
        record.cut(50)                                      # the run goes on after step 50
        record.made(51)
    """

    def __init__(self, workdir: Path, config: Config, write_text: Callable[[str, str], None]) -> None:
        """Writes config.json where the directory has no step yet.

        Args:
          write_text: writes a file of the directory, by its name and text, atomically.

        Raises:
          UserError: the run in the directory has a checkpoint, and the config differs from its
            newest step's in a key that can't change.
        """
        self._workdir, self._write_text = workdir, write_text
        self._text, self._is_written = config_io.to_json(config), False
        metrics, has_checkpoint = workdir / "metrics.jsonl", any((workdir / "checkpoints").glob("[0-9]*"))
        if has_checkpoint:
            resume.check(workdir / FILE, config)
        has_steps = has_checkpoint or (metrics.exists() and metrics.stat().st_size)
        if not has_steps or not (workdir / FILE).exists():
            write_text(FILE, self._text)

    def cut(self, step: int) -> None:
        """Deletes what is kept of steps after `step`, which will be made again."""
        for first, path in kept(self._workdir).items():
            if first > step:
                path.unlink()

    def made(self, step: int) -> None:
        """Records that a step was made with this config."""
        if self._is_written:
            return
        self._is_written = True
        before = kept(self._workdir)
        if not before or before[max(before)].read_text() != self._text:
            (self._workdir / FOLDER).mkdir(exist_ok=True)
            self._write_text(f"{FOLDER}/{step}.json", self._text)
        self._write_text(FILE, self._text)


def kept(workdir: Path) -> dict[int, Path]:
    """Returns the files in configs/ by the first step that was made with them, ascending."""
    paths = {int(path.stem): path for path in (workdir / FOLDER).glob("*.json") if path.stem.isdigit()}
    return dict(sorted(paths.items()))
