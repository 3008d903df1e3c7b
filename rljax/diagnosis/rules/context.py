"""Context: what the run was made with, and whether that stayed the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.rule import Rule, Sign, rule

FILE = ("context.json",)
IDENTITY = {"model": "the model directory", "data": "the training prompts", "seed": "the seed", "reward": "the reward"}
CIRCUMSTANCES = {"commit": "the code", "rljax": "the version of rljax", "packages": "packages", "hardware": "the hardware"}


@rule(
    "context.unrecorded",
    "The run does not say what it was made with, so that nobody can make it again.",
    causes=("an older rljax, or a log without its run directory",),
    next="keep WORKDIR/config.json and WORKDIR/context.json with the metrics",
)
def unrecorded(history: History) -> Sign | None:
    lacking = [name for name, there in (("config.json", history.config), ("context.json", history.context)) if not there]
    return Sign(Severity.NOTE, history.first_step, f"there is no {' and no '.join(lacking)}", series=FILE) if lacking else None


@rule(
    "context.changed",
    "The run went on with another reward, model, seed or other prompts: it is two runs in one directory.",
    causes=("files were replaced between two sessions", "a key was changed that recover.mode=auto does not check"),
    next="rljax doctor --diff of the two sessions' directories; begin in a new --workdir",
)
def changed(history: History) -> Sign | None:
    found = _changed(history, IDENTITY)
    if found is None:
        return None
    step, names = found
    return Sign(Severity.BROKEN, step, f"{', '.join(names)} changed when the run went on at step {step}", series=FILE)


@rule(
    "context.circumstances_changed",
    "The run went on with other code, other packages or on another machine.",
    causes=("an update between two sessions",),
    next="rljax doctor --diff of this run and an earlier one",
)
def circumstances_changed(history: History) -> Sign | None:
    changed = _changed(history, CIRCUMSTANCES)
    if changed is None:
        return None
    step, names = changed
    return Sign(Severity.NOTE, step, f"{', '.join(names)} changed when the run went on at step {step}", series=FILE)


def _changed(history: History, keys: Mapping[str, str]) -> tuple[int, list[str]] | None:
    """Returns the first step of the session in which a key changed, and what changed."""
    for before, after in itertools.pairwise(history.context):
        found = [words for key, words in keys.items() if _differ(_of(before, key), _of(after, key))]
        if found:
            return int(after.get("first_step", 0)) + 1, found
    return None


def _of(session: Mapping[str, Any], key: str) -> Any:
    """Returns a value of a session; the reward is part of its evaluation protocol."""
    protocol = session.get("evaluation")
    return protocol.get(key) if key == "reward" and isinstance(protocol, dict) else session.get(key)


def _differ(before: Any, after: Any) -> bool:
    return before is not None and after is not None and before != after


@rule(
    "context.dirty",
    "The run was made with changes to the code that are not committed.",
    causes=("work in progress",),
    next="commit, so that the commit in context.json says what ran",
)
def dirty(history: History) -> Sign | None:
    sessions = [session for session in history.context if session.get("dirty") is True]
    if not sessions:
        return None
    line = f"commit {sessions[0].get('commit')} had changes that are not committed"
    return Sign(Severity.NOTE, int(sessions[0].get("first_step", 0)) + 1, line, series=FILE)


RULES: tuple[Rule, ...] = (unrecorded, changed, circumstances_changed, dirty)
