"""Reward-hacking audit: what changed in completions as the reward rose, and samples to read.

    found = audit(History.load(workdir), score=my_score)
    write(found, Path("audit"))        # audit/audit.md to read, audit/audit.json for scripts

It reads samples.jsonl, which has `stats_logger.samples_per_step` completions of each step.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rljax.diagnosis import text
from rljax.diagnosis.doctor import diagnose
from rljax.diagnosis.finding import Finding
from rljax.diagnosis.history import History
from rljax.diagnosis.progress import Divergence, divergence
from rljax.diagnosis.rules.hacking import RULES, gains_line
from rljax.diagnosis.thresholds import AUDITED
from rljax.errors import UserError

Score = Callable[[str, str], float]  # of a prompt's and a completion's text
Sample = Mapping[str, Any]

COUNT = 8  # samples of each kind
DISAGREEMENT = 0.5  # of the range of either score

# Features of a completion, by the words of the report
FEATURES: Mapping[str, Callable[[str], float]] = {
    "characters": lambda completion: float(len(completion)),
    "repetition (share of 4-grams)": text.repetition,
    "refusals (share of samples)": text.is_refusal,
    "tool calls (per sample)": text.tool_calls,
}


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """A sample to which reward and independent score give different ranks."""

    sample: Sample
    score: float
    apart: float  # distance in shares of the two ranges


@dataclasses.dataclass(frozen=True)
class Audit:
    """Result of an audit."""

    source: str
    gains: Divergence | None  # None with fewer than three evaluations
    findings: tuple[Finding, ...]  # of the rules that audit
    changes: Mapping[str, text.Drift]  # early and late samples, by feature
    opening: tuple[text.Drift, str] | None  # the most common opening of late completions
    highest: tuple[Sample, ...]
    lowest: tuple[Sample, ...]
    picked: tuple[Sample, ...]  # at random
    scored: int  # samples that the independent score was asked about
    correlation: float | None  # of reward and score
    disagreements: tuple[Disagreement, ...]  # the furthest apart first


def audit(history: History, score: Score | None = None, *, count: int = COUNT, seed: int = 0) -> Audit:
    """Audits a run.

    Args:
      score: independent score of (prompt text, completion text); only its order matters.
      count: samples of each kind.
      seed: seed of the samples that are picked at random.

    Raises:
      UserError: the run has no samples, or the score raises.
    """
    samples = [s for s in history.samples if isinstance(s.get("reward"), int | float)]
    if not samples:
        raise UserError(f"--audit: {history.source} has no samples.jsonl (stats_logger.samples_per_step)")
    late = samples[len(samples) // 2 :]
    ranked = sorted(late, key=lambda sample: float(sample["reward"]))
    drifts = {name: text.drift(samples, feature, AUDITED) for name, feature in FEATURES.items()}
    correlation, disagreements = _compare(samples, score) if score else (None, [])
    return Audit(
        source=history.source,
        gains=divergence(history),
        findings=diagnose(history, RULES).findings,
        changes={name: drift for name, drift in drifts.items() if drift is not None},
        opening=text.opening_drift(samples, AUDITED),
        highest=tuple(ranked[::-1][:count]),
        lowest=tuple(ranked[:count]),
        picked=tuple(random.Random(seed).sample(samples, min(count, len(samples)))),
        scored=len(samples) if score else 0,
        correlation=correlation,
        disagreements=tuple(disagreements[:count]),
    )


def _compare(samples: Sequence[Sample], score: Score) -> tuple[float | None, list[Disagreement]]:
    """Scores all samples; returns the correlation, and those far apart, the furthest first."""
    try:
        scores = np.array([float(score(str(s["prompt"]), str(s["completion"]))) for s in samples])
    except Exception as error:  # the score is the user's own code: it may raise anything
        reason = " ".join(str(error).split())
        raise UserError(f"--score: it raised {type(error).__name__}: {reason}") from error
    rewards = np.array([float(s["reward"]) for s in samples])
    apart = np.abs(_share_of_range(rewards) - _share_of_range(scores))
    constant = np.ptp(rewards) == 0 or np.ptp(scores) == 0
    order = np.argsort(-apart, kind="stable")
    far = [Disagreement(samples[i], float(scores[i]), float(apart[i])) for i in order if apart[i] > DISAGREEMENT]
    return (None if constant else float(np.corrcoef(rewards, scores)[0, 1])), far


def _share_of_range(values: np.ndarray) -> np.ndarray:
    width = float(np.ptp(values))
    shares: np.ndarray = (values - values.min()) / width if width else np.zeros(len(values))
    return shares


def write(found: Audit, directory: Path) -> None:
    """Writes audit.md and audit.json. Raises UserError if the directory can't be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "audit.md").write_text(page(found))
        (directory / "audit.json").write_text(json.dumps(to_json(found), indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--audit: cannot write {directory}: {error.strerror}") from None


def to_json(found: Audit) -> dict[str, Any]:
    """Returns an audit as JSON values."""
    return {
        "source": found.source,
        "gains": None if found.gains is None else dataclasses.asdict(found.gains),
        "findings": [finding.json() for finding in found.findings],
        "changes": {name: drift._asdict() for name, drift in found.changes.items()},
        "opening": None if found.opening is None else found.opening[0]._asdict() | {"text": found.opening[1]},
        "highest": list(found.highest),
        "lowest": list(found.lowest),
        "random": list(found.picked),
        "scored": found.scored,
        "correlation": found.correlation,
        "disagreements": [
            {"sample": entry.sample, "score": entry.score, "apart": entry.apart} for entry in found.disagreements
        ],
    }


def page(found: Audit) -> str:
    """Returns an audit as Markdown to read."""
    lines = [f"# Reward audit of {found.source}", ""]
    lines += [gains_line(found.gains) if found.gains else "Fewer than three evaluations: held-out reward says nothing yet.", ""]
    lines += [f"- {f.severity} {f.rule}, step {f.step}: {f.evidence[0]}" for f in found.findings] or [
        "No rule of the audit speaks."
    ]
    lines += ["", "| in completions | early | late |", "| --- | --- | --- |"]
    lines += [f"| {name} | {drift.early:.3g} | {drift.late:.3g} |" for name, drift in found.changes.items()]
    if found.opening is not None:
        drift, opening = found.opening
        lines.append(f"| begin with {_inline(opening)} | {drift.early:.0%} | {drift.late:.0%} |")
    for title, samples in (
        ("Highest rewards, of the later half", found.highest),
        ("Lowest rewards, of the later half", found.lowest),
        ("At random", found.picked),
    ):
        lines += ["", f"## {title}", *(line for sample in samples for line in _sample(sample))]
    if found.scored:
        lines += ["", "## Reward and independent score", "", _agreement(found)]
        lines += [line for entry in found.disagreements for line in _sample(entry.sample, f", score {entry.score:.4g}")]
    return "\n".join(lines) + "\n"


def _agreement(found: Audit) -> str:
    correlation = "constant" if found.correlation is None else f"correlated by {found.correlation:.2f}"
    return f"Over {found.scored} samples they are {correlation}. Furthest apart:"


def _sample(sample: Sample, more: str = "") -> list[str]:
    body = f"{sample['prompt']}\n---\n{sample['completion']}"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", body)), default=2))
    components = ", ".join(f"{name} {value:.4g}" for name, value in dict(sample.get("components") or {}).items())
    head = f"step {sample['step']}, reward {sample['reward']:.4g}{f' ({components})' if components else ''}{more}"
    return ["", head, "", fence, body, fence]


def _inline(value: str) -> str:
    """Returns a text as inline code for a cell of a table."""
    return f"`{value!r}`".replace("|", "\\|") if "`" not in value else repr(value).replace("|", "\\|")
