"""Lengths in tokens against the limits of sampler and learner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rljax.sanity.findings import Finding, Severity

BINS = 8
BAR = 40  # characters of the longest bar


def check_lengths(
    part: str, lengths: Sequence[int] | np.ndarray, *, limit: int | None, why: str, skipped: int = 0
) -> Iterator[Finding]:
    """Checks lengths against a limit, and shows their distribution.

    Args:
      part: what is measured, as "train_dataset: prompts".
      lengths: [n] tokens, at least one.
      limit: most tokens; None for no limit.
      why: the setting that limits them, for the remedy.
      skipped: examples that max_length leaves out already.
    """
    values = np.asarray(lengths)
    p50, p95 = np.percentile(values, [50, 95])
    line = f"{len(values)} of {values.min()} to {values.max()} tokens, median {p50:.0f}, 95% up to {p95:.0f}"
    bars = histogram(values)
    yield Finding(Severity.NOTE, part, "\n".join([line, *(bars if len(bars) > 1 else [])]))
    if skipped:
        share = skipped / (skipped + len(values))
        severity = Severity.WARNING if share > 0.1 else Severity.NOTE
        yield Finding(severity, part, f"{skipped} more ({share:.0%}) are longer than max_length and left out")
    if limit is None:
        return
    over = int((values > limit).sum())
    if over:
        yield Finding(Severity.ERROR, part, f"{over} of {len(values)} are longer than {limit} tokens", why)
    elif values.max() > 0.9 * limit:
        yield Finding(Severity.NOTE, part, f"the longest is within 10% of the limit of {limit} tokens", why)


def check_turns(part: str, lengths: Sequence[int] | np.ndarray, *, between: int, context: int, why: str) -> Iterator[Finding]:
    """Warns of prompts that leave no room for a second turn: their episodes end with the first.

    Args:
      lengths: [n] tokens of the prompts, at least one.
      between: tokens that are given between two completions.
      context: most tokens of prompt and completion.
      why: the settings that say so, for the remedy.
    """
    full = int((np.asarray(lengths) + 1 + between >= context).sum())  # a completion has one token at least
    if full:
        line = f"{full} of {len(lengths)} leave no room for a second turn, which {between} tokens of feedback precede"
        yield Finding(Severity.WARNING, part, f"{line}: their episodes end with the first", why)


def histogram(values: np.ndarray) -> list[str]:
    """Returns a text histogram: a line per bin of integers that has some, with bar and count."""
    low, high = int(values.min()), int(values.max())
    bins = min(BINS, high - low + 1)
    edges = np.unique(np.linspace(low, high + 1, bins + 1).round().astype(int))
    counts, _ = np.histogram(values, edges)
    width = len(str(high))
    return [
        f"  {edges[i]:{width}} to {edges[i + 1] - 1:{width}}  {'#' * int(np.ceil(BAR * count / counts.max())):{BAR}}  {count}"
        for i, count in enumerate(counts)
        if count
    ]
