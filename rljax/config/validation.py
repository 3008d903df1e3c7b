"""Validation sets by name: `valid_dataset`, and those of `valid_datasets`, which differ from it."""

from __future__ import annotations

from rljax.config import io as config_io
from rljax.config.registry import nearest
from rljax.config.schema import Config, DatasetConfig
from rljax.errors import UserError

MAIN = ""
"""Name of `valid_dataset` itself, whose metrics have no name of a set in them."""

METRICS = ("failed", "lost", "reward", "no_eos_ratio", "seq_len", "version")  # beside which a set's name would stand
TAKEN = (*METRICS, "valid_dataset")  # the last is what binaries and results call the main set


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


def best_set(config: Config) -> str:
    """Returns the name of the set whose metric `evaluator.best` is."""
    parts = (config.evaluator.best or "").split("/")
    return parts[1] if len(parts) > 2 and parts[1] in config.valid_datasets else MAIN


def check_best(config: Config) -> None:
    """Checks that evaluations have the metric of `evaluator.best`, as far as the config can tell.

    Components of a reward and kinds of failures are known only later. Raises UserError.
    """
    best = config.evaluator.best
    if best is None:
        return
    metric = best.removesuffix("/avg")
    sets = [f"{name}/" if name else "" for name in (MAIN, *config.valid_datasets)]
    passing = [f"pass@{k}" for k in config.evaluator.ks]
    known = [f"eval-rollout/{of_set}{name}" for of_set in sets for name in (*METRICS, *passing)]
    later = tuple(f"eval-rollout/{of_set}{name}/" for of_set in sets for name in ("failed", "lost"))
    if metric not in known and not metric.startswith((*later, "eval-reward/")):
        raise UserError(f"evaluator.best: an evaluation has no metric {best!r} ({nearest(metric, known)})")


def key_of(name: str) -> str:
    """Returns the config section of a set, for errors: valid_dataset, or valid_datasets.NAME."""
    return f"valid_datasets.{name}" if name else "valid_dataset"
