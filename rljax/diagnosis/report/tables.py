"""Tables of the page: config, context, guard actions, metrics, and the links of the loop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.diagnosis.finding import Diagnosis, Link, Standing
from rljax.diagnosis.history import History
from rljax.diagnosis.rule import Rule

# Files of a run directory that the page reads, and what it lacks without them
FILES = {
    "metrics.jsonl": "curves",
    "histograms.jsonl": "histograms over steps",
    "samples.jsonl": "samples to read",
    "config.json": "the config, and rules that need it",
    "context.json": "versions, hardware and the evaluation protocol",
    "status.json": "the run's state",
    "guard.jsonl": "actions of the guardrails",
    "plan.json": "the plan beside what was measured",
}
OPTIONAL_FILES = ("guard.jsonl", "plan.json")  # written when there is something to write


@dataclasses.dataclass(frozen=True)
class LinkState:
    """One link of the loop, and what the doctor says of it."""

    name: str
    state: str  # broken, warning, note, ok or unjudged
    detail: str


@dataclasses.dataclass(frozen=True)
class MetricRow:
    """Summary of one series of metrics.jsonl."""

    name: str
    values: int
    first: float
    last: float
    mean: float
    low: float
    high: float


def links(history: History, diagnosis: Diagnosis, rules: Sequence[Rule]) -> list[LinkState]:
    """Returns all links in order, each with its worst finding."""
    states = []
    for link in Link:
        about = [rule for rule in rules if rule.link is link and rule.is_about(history)]
        judged = [rule for rule in about if rule.id not in diagnosis.unjudged]
        found = [finding for finding in diagnosis.findings if finding.link is link]
        if found:
            worst = max(found, key=lambda finding: finding.severity)
            states.append(LinkState(str(link), str(worst.severity), f"{worst.rule.partition('.')[2]}, step {worst.step}"))
        elif not history.rl_steps:
            states.append(LinkState(str(link), "unjudged", "no RL steps"))
        elif judged:
            states.append(LinkState(str(link), "ok", f"{len(judged)} of {len(about)} rules judged"))
        else:
            why = f"{len(about)} rules lack their metrics" if about else "no rule is about this run"
            states.append(LinkState(str(link), "unjudged", why))
    return states


def standing(history: History) -> list[str]:
    """Returns how far the run has come, and its error if it failed, as lines."""
    status = history.status or {}
    total, error = (status.get(key) for key in ("total_steps", "error"))
    state = history.state
    of_total = (f" of {total}" if total >= history.last_step else f" ({total} asked for)") if total else ""
    behind = f", behind {history.first_step - 1} supervised ones" if history.rl_steps and history.first_step > 1 else ""
    lines = [f"{f'{state}, ' if state else ''}step {history.last_step}{of_total}: {history.rl_steps} RL steps{behind}"]
    return [*lines, f"error: {error or history.lost}"] if error or history.lost else lines


def state_of(diagnosis: Diagnosis) -> str:
    """Returns the state of the whole run: broken, warning, unjudged or ok."""
    states = {Standing.FAILED: "broken", Standing.NOT_JUDGED: "unjudged", Standing.HEALTHY: "ok"}
    return states.get(diagnosis.standing, str(diagnosis.standing).lower())


def changed_keys(config: Config | None) -> list[tuple[str, str, str]]:
    """Returns the config's keys that are not at their default, as (key, value, default)."""
    if config is None:
        return []
    given, defaults = dict(flat(config_io.to_dict(config))), dict(flat(config_io.to_dict(Config())))
    return [(key, text(value), text(defaults.get(key))) for key, value in given.items() if value != defaults.get(key)]


def context_rows(sessions: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Returns the context as (key, value per session)."""
    flattened = [dict(flat(session)) for session in sessions]
    keys = dict.fromkeys(key for session in flattened for key in session)
    return [(key, [text(session[key]) if key in session else "" for session in flattened]) for key in keys]


def metric_rows(history: History) -> list[MetricRow]:
    """Returns a summary of every series, by name."""
    rows = []
    for name, values in sorted(history.series.items()):
        found = values[np.isfinite(values)]
        if len(found):
            ends = (float(found[0]), float(found[-1]), float(found.mean()), float(found.min()), float(found.max()))
            rows.append(MetricRow(name, len(found), *ends))
    return rows


def missing_files(history: History) -> list[tuple[str, str]]:
    """Returns the files that the run directory lacks, and what the page lacks for it."""
    directory = Path(history.source)
    if not directory.is_dir():
        return []
    return [(name, what) for name, what in FILES.items() if name not in OPTIONAL_FILES and not (directory / name).is_file()]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def text(value: Any) -> str:
    """Writes a value of a config or context as one would in JSON; text without its quotes."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
