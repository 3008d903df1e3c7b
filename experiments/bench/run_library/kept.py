"""Keeps what rules read of many runs in one compressed file, a line per run.

    {"recipe": "lr_x100", "seed": 1, "seconds": 31.2,
     "files": {"metrics.jsonl": [{...}, ...], "config.json": {...}, ...}}

Numbers are rounded to five significant digits. `unpack` makes run directories of the lines again.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rljax import json_lines
from rljax.errors import UserError

TABLES = ("metrics.jsonl", "histograms.jsonl", "samples.jsonl", "guard.jsonl")  # an object per line
OBJECTS = ("config.json", "context.json", "status.json")
DIGITS = 5
SUFFIX = ".jsonl.xz"


@dataclasses.dataclass(frozen=True)
class KeptRun:
    """Files of one run, as far as rules read them.

    Example: KeptRun("lr_x100", 1, 31.2, {"metrics.jsonl": [{"step": 1, "rollout/reward": 0.2}]})
    """

    recipe: str
    seed: int
    seconds: float  # from the start of its first process to the end of its last
    files: dict[str, Any]  # name -> object, or list of objects

    @classmethod
    def of(cls, recipe: str, seed: int, seconds: float, workdir: Path, hidden: Sequence[Path]) -> KeptRun:
        """Reads a run directory.

        Args:
          hidden: directories whose paths are cut from all texts, so that a kept run does not tell
            where it was made.
        """
        found = {name: json_lines.parts(workdir / name) for name in (*TABLES, *OBJECTS)}
        texts = {name: "".join(part.read_text() for part in parts) for name, parts in found.items() if parts}
        for path in hidden:
            texts = {name: text.replace(f"{path}/", "").replace(str(path), ".") for name, text in texts.items()}
        files: dict[str, Any] = {
            name: [json.loads(line) for line in texts[name].split("\n") if line] for name in TABLES if name in texts
        }
        files |= {name: json.loads(texts[name]) for name in OBJECTS if name in texts}
        return cls(recipe, seed, round(seconds, 1), rounded(files))

    def write(self, workdir: Path) -> None:
        """Writes a run directory with the kept files."""
        workdir.mkdir(parents=True)
        for name, content in self.files.items():
            lines = content if name in TABLES else [content]
            (workdir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def rounded(value: Any) -> Any:
    """Rounds all floats in JSON values."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def append(path: Path, run: KeptRun) -> None:
    """Adds a run to a file, which is whole after each call."""
    with lzma.open(path, "at", encoding="utf-8") as file:
        file.write(_line(run))


def write(path: Path, runs: Iterable[KeptRun]) -> None:
    """Writes a file of runs in one piece, which is smaller than one that grew run by run."""
    with lzma.open(path, "wt", encoding="utf-8", preset=lzma.PRESET_EXTREME | 9) as file:
        file.writelines(_line(run) for run in runs)


def read(path: Path, only: Collection[str] = ()) -> Iterator[KeptRun]:
    """Yields the runs of a file. Raises UserError if there is none.

    Args:
      only: recipes to read; empty for all.
    """
    beginnings = tuple(_beginning(recipe) for recipe in only)
    if not path.is_file():
        raise UserError(f"{path}: no such file (made by python -m experiments.bench.broken_runs --all)")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            if not beginnings or line.startswith(beginnings):
                yield KeptRun(**json.loads(line))


def _beginning(recipe: str) -> str:
    return f'{{"recipe":{json.dumps(recipe)},'


def _line(run: KeptRun) -> str:
    return json.dumps(dataclasses.asdict(run), separators=(",", ":"), ensure_ascii=False) + "\n"
