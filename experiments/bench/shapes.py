"""Models of known shapes with random weights, for benchmarks that no checkpoint is needed for."""

from __future__ import annotations

import fcntl
from pathlib import Path

from rljax.hf import ModelSpec, init_directory
from rljax.hf.companion_files import write_companions
from rljax.hf.shapes import SHAPES, shape_of

__all__ = ["SHAPES", "make_model", "write_config"]


def make_model(directory: Path, shape: str) -> ModelSpec:
    """Writes a model of the shape in bfloat16, unless the directory has one.

    Of several programs that want it at once, the first writes it and the others wait.
    """
    vocabulary, model = SHAPES[shape]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "config.json").is_file():
            init_directory(model, directory, seed=0, vocab_size=vocabulary, eos_token_ids=[2], dtype="bfloat16")
    return ModelSpec.from_directory(directory)


def write_config(directory: Path, shape: str) -> ModelSpec:
    """Writes the config.json of the shape alone, for programs that are compiled and not run."""
    spec = shape_of(shape)
    write_companions(directory, spec, "bfloat16", None)
    return spec
