"""Samples of a run for reading: which of them, and their tokens by advantage and by version."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rljax.diagnosis.run_files import MOST_STEPS, number_of

STEPS_SHOWN = 8  # over the run; those around the first break are among them
SAMPLES_PER_STEP = 4
MOST_TOKENS = 1200  # of a completion; the rest is counted
MOST_PROMPT = 1500  # characters of a prompt; its end is shown
SHADES = 4  # of an advantage, on either side of 0
VERSIONS = 6  # colors of versions in one sample
LONGEST = 1 << 22  # tokens of a trajectory; a line that claims more is damaged


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a completion, or the whole completion where its tokens were not recorded."""

    text: str
    style: str  # CSS classes: a-4 to a4 by advantage, v0 (the newest in the sample) to v5 by version
    title: str  # shown on hover


@dataclasses.dataclass(frozen=True)
class Sample:
    """One trajectory, laid out."""

    step: int
    uid: str
    prompt: str
    cut: int  # characters of the prompt that are not shown, from its beginning
    tokens: tuple[Token, ...]
    left_out: int  # tokens of the completion that are not shown, from its end
    reward: float | None
    components: Mapping[str, float]
    finish: str
    versions: tuple[int, ...]  # of its tokens, ascending
    advantages: bool  # its tokens have them


def pick(samples: Sequence[Mapping[str, Any]], marked: int | None) -> list[Sample]:
    """Returns samples of up to STEPS_SHOWN steps, of each the lowest and the highest reward first.

    The steps are spread over the run, and include the marked one, of the first break, and its
    neighbors. Lines that are no samples are left out.
    """
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for sample in filter(is_sample, samples):
        by_step.setdefault(sample["step"], []).append(sample)
    chosen = [sample for step in _steps(sorted(by_step), marked) for sample in _extremes(by_step[step])]
    largest = max((abs(value) for sample in chosen for value in _advantages(sample) if value is not None), default=0.0)
    return [laid_out(sample, largest) for sample in chosen]


def is_sample(line: Mapping[str, Any]) -> bool:
    """Returns whether the fields of a line that has a step are of a sample's kinds."""
    pieces, components = line.get("pieces"), line.get("components")
    return (
        (pieces is None or (isinstance(pieces, list) and all(isinstance(piece, str) for piece in pieces)))
        and (components is None or (isinstance(components, dict) and all(map(_is_number_or_null, components.values()))))
        and _is_number_or_null(line.get("reward"))
        and _are_runs(line.get("advantages", []), _is_number_or_null)
        and _are_runs(line.get("versions", []), lambda version: type(version) is int and abs(version) <= MOST_STEPS)
    )


def _are_runs(value: object, is_value: Callable[[object], bool]) -> bool:
    """Returns whether a value is a list of [value, count] as tokens have them."""
    if not isinstance(value, list) or not all(isinstance(run, list) and len(run) == 2 for run in value):
        return False
    whole = all(is_value(each) and type(count) is int and 0 <= count <= LONGEST for each, count in value)
    return whole and sum(count for _, count in value) <= LONGEST


def _is_number_or_null(value: object) -> bool:
    """Returns whether a value of JSON is null or a number that a float64 holds."""
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(number_of(value))


def laid_out(sample: Mapping[str, Any], largest_advantage: float) -> Sample:
    """Lays out one line of samples.jsonl for which `is_sample` holds.

    Args:
      largest_advantage: magnitude that gets the strongest shade.
    """
    prompt, completion = str(sample.get("prompt", "")), str(sample.get("completion", ""))
    versions = [version for version, count in sample.get("versions", ()) for _ in range(count)]
    pieces = sample.get("pieces")
    texts = [completion] if pieces is None else [str(piece) for piece in pieces]
    of_texts = versions[:1] if pieces is None else versions
    advantages = _advantages(sample)
    newest_first = sorted({version for version in versions if version >= 0}, reverse=True)
    tokens = (
        _token(text, advantage, version, largest_advantage, newest_first)
        for text, advantage, version in itertools.zip_longest(texts, advantages, of_texts)
        if text is not None
    )
    reward = sample.get("reward")
    return Sample(
        step=sample["step"],
        uid=str(sample.get("uid", "")),
        prompt=prompt[-MOST_PROMPT:],
        cut=max(0, len(prompt) - MOST_PROMPT),
        tokens=tuple(itertools.islice(tokens, MOST_TOKENS)),
        left_out=max(0, len(texts) - MOST_TOKENS),
        reward=None if reward is None else float(reward),
        components={str(name): value for name, value in (sample.get("components") or {}).items()},
        finish=str(sample.get("finish", "")),
        versions=tuple(newest_first[::-1]),
        advantages=bool(advantages) and pieces is not None,
    )


def _token(text: str, advantage: float | None, version: int | None, largest: float, newest_first: Sequence[int]) -> Token:
    styles, titles = [], []
    if advantage is not None:
        shade = round(SHADES * np.clip(advantage / largest, -1, 1)) if largest else 0
        styles.append(f"a{shade}")
        titles.append(f"advantage {advantage:+.3g}")
    if version is not None and version >= 0:
        styles.append(f"v{min(newest_first.index(version), VERSIONS - 1)}")
        titles.append(f"version {version}")
    elif version is not None:
        styles.append("not-sampled")
        titles.append("not sampled by the policy")
    return Token(text, " ".join(styles), ", ".join(titles))


def _advantages(sample: Mapping[str, Any]) -> list[float | None]:
    """Returns the advantage of each token; [] where they were not recorded."""
    return [value for value, count in sample.get("advantages", ()) for _ in range(count)]


def _steps(steps: Sequence[int], marked: int | None) -> list[int]:
    """Chooses steps: those around the break, then evenly over the run; ascending."""
    if len(steps) <= STEPS_SHOWN:
        return list(steps)
    chosen: set[int] = set()
    if marked is not None:
        at = int(np.searchsorted(steps, marked))
        chosen.update(steps[max(0, at - 1) : at + 2])
    spread = np.linspace(0, len(steps) - 1, STEPS_SHOWN - len(chosen)).round().astype(int)
    return sorted(chosen.union(steps[i] for i in spread))


def _extremes(samples: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns at most SAMPLES_PER_STEP samples: lowest and highest rewards first, in turn."""
    ordered = sorted(samples, key=lambda sample: sample["reward"] if sample.get("reward") is not None else -np.inf)
    in_turn = itertools.chain.from_iterable(zip(ordered, reversed(ordered), strict=True))
    unique = {id(sample): sample for sample in in_turn}
    return list(unique.values())[:SAMPLES_PER_STEP]
