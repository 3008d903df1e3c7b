"""Validation sets by name: `valid_dataset`, and those of `valid_datasets`, which differ from it."""

from __future__ import annotations

from rljax.config import io as config_io
from rljax.config.schema import Config, DatasetConfig
from rljax.errors import UserError

MAIN = ""
"""Name of `valid_dataset` itself, whose metrics have no name of a set in them."""

TAKEN = ("failed", "lost", "reward", "no_eos_ratio", "seq_len", "version")  # metrics beside which a set's name would stand


def validation_sets(config: Config) -> dict[str, DatasetConfig]:
    """Returns the validation sets by name, the main one first.

    Raises UserError for a name or a key that can't be.
    """
    sets = {MAIN: config.valid_dataset}
    for name, changes in config.valid_datasets.items():
        path = f"valid_datasets.{name}"
        if not name.isidentifier() or name in TAKEN or name.startswith("pass"):
            raise UserError(f"{path}: no name for a set (letters, digits and underscores; not {', '.join(TAKEN)} or pass...)")
        sets[name] = config_io.section_with(config.valid_dataset, changes, path)
    return sets


def key_of(name: str) -> str:
    """Returns the config section of a set, for errors: valid_dataset, or valid_datasets.NAME."""
    return f"valid_datasets.{name}" if name else "valid_dataset"
