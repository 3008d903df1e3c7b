"""Features of completions as text: repetition, templates, refusals, tool calls.

They are read from samples.jsonl, which has a few completions per step.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Sample = Mapping[str, Any]

NGRAM = 4
REFUSAL = re.compile(
    r"\b(i('m| am) (sorry|unable|not able)|i (can ?not|can't|won't|will not) (help|assist|answer|provide|do|comply|fulfill)"
    r"|as an ai\b|i must decline)",
    re.IGNORECASE,
)
TOOL_CALL = re.compile(r"<tool_call>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>|\"tool_calls\"")
OPENING_SHARE = 0.25  # of a completion's length: what counts as its opening
OPENING = (2, 24)  # least and most characters of an opening


class Drift(NamedTuple):
    """Mean of a feature over early and late samples of a run."""

    early: float
    late: float
    error: float  # standard error of the difference
    step: int  # first step of the late samples

    def rises(self, by: float, errors: float) -> bool:
        """Returns whether it rose by more than `by` and by more than `errors` standard errors."""
        return self.late - self.early > max(by, errors * self.error)


def repetition(text: str) -> float:
    """Returns the share of a text's 4-grams of words that occurred before in it.

    A text of fewer than eight words is taken by characters.
    """
    words: Sequence[str] = text.split()
    units = words if len(words) >= 2 * NGRAM else text
    grams = [tuple(units[i : i + NGRAM]) for i in range(len(units) - NGRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_refusal(text: str) -> float:
    """Returns 1 for a text that declines to answer, else 0."""
    return float(REFUSAL.search(text) is not None)


def tool_calls(text: str) -> float:
    """Returns the number of tool calls in a text."""
    return float(len(TOOL_CALL.findall(text)))


def openings(samples: Sequence[Sample]) -> list[str]:
    """Returns the first characters of each completion, as many for all of them."""
    texts = [str(sample.get("completion", "")) for sample in samples]
    typical = sorted(map(len, texts))[len(texts) // 2] if texts else 0
    length = min(max(round(OPENING_SHARE * typical), OPENING[0]), OPENING[1])
    return [text[:length] for text in texts]


def early_and_late(samples: Sequence[Sample], count: int) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """Returns the first and the last `count` samples; fewer, if a run has few, but never the same."""
    n = min(count, len(samples) // 2)
    return samples[:n], samples[len(samples) - n :]


def drift(samples: Sequence[Sample], feature: Callable[[str], float], count: int) -> Drift | None:
    """Compares a feature of completions early and late in a run; None without samples."""
    early, late = early_and_late(samples, count)
    if not early:
        return None
    before, after = ([feature(str(s.get("completion", ""))) for s in part] for part in (early, late))
    return _drift(before, after, int(late[0]["step"]))


def opening_drift(samples: Sequence[Sample], count: int) -> tuple[Drift, str] | None:
    """Compares how many completions share the most common opening of the late samples."""
    early, late = early_and_late(samples, count)
    if not early:
        return None
    firsts = openings([*early, *late])
    before, after = firsts[: len(early)], firsts[len(early) :]
    ((common, _),) = collections.Counter(after).most_common(1)
    return _drift([float(o == common) for o in before], [float(o == common) for o in after], int(late[0]["step"])), common


def _drift(before: Sequence[float], after: Sequence[float], step: int) -> Drift:
    def moments(values: Sequence[float]) -> tuple[float, float]:
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        return mean, max(variance, 1 / (4 * len(values))) / len(values)  # constant values are not known to be so

    (early, error), (late, other) = moments(before), moments(after)
    return Drift(early, late, math.sqrt(error + other), step)
