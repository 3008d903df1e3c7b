"""Differences between the contexts of two runs: config, seed, code, packages, hardware, protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rljax.config import io as config_io
from rljax.diagnosis.history import History

MISSING = "(none)"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One value that differs.

    Example: Difference("config", "actor.optimizer.lr", 1e-6, 1e-5)
    """

    about: str  # config, seed, code, packages, hardware, model, data, evaluation
    key: str
    ours: Any
    theirs: Any

    def json(self) -> dict[str, Any]:
        return {"about": self.about, "key": self.key, "a": self.ours, "b": self.theirs}

    def __str__(self) -> str:
        return f"{self.key}: {self.ours} -> {self.theirs}"


# What a session of context.json says, by the key it is under
ABOUT = {
    "seed": "seed",
    "rljax": "code",
    "commit": "code",
    "dirty": "code",
    "packages": "packages",
    "hardware": "hardware",
    "model": "model",
    "data": "data",
    "evaluation": "evaluation",
}


def differences(ours: History, theirs: History) -> list[Difference]:
    """Lists what differs between two runs, by configs and the last sessions of their contexts.

    What only one of them recorded counts as a difference.
    """
    found = [Difference("config", *entry) for entry in _differ(_config(ours), _config(theirs))]
    a, b = (history.context[-1] if history.context else {} for history in (ours, theirs))
    for key, about in ABOUT.items():
        found += [Difference(about, *entry) for entry in _differ(_flat(a.get(key), key), _flat(b.get(key), key))]
    return found


def unrecorded(history: History) -> list[str]:
    """Returns the files that say what a run was made with, and that it lacks."""
    return [name for name, there in (("config.json", history.config), ("context.json", history.context)) if not there]


def _config(history: History) -> dict[str, Any]:
    return {} if history.config is None else dict(_flatten(config_io.to_dict(history.config), ""))


def _flat(value: Any, key: str) -> dict[str, Any]:
    return {} if value is None else dict(_flatten(value, key))


def _flatten(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _differ(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        a, b = ours.get(key, MISSING), theirs.get(key, MISSING)
        if _comparable(a) != _comparable(b):
            yield key, a, b


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
