"""Rewards of a few real episodes: whether the policy can learn from them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from rljax.rollout.evaluation import Episodes, reward_of
from rljax.sanity.findings import Finding, Severity
from rljax.types import Finish, Trajectory

PART = "rollouts"
BAR = 40
MUCH_CUT = 0.5  # share of completions cut at the limit


def check_rollouts(episodes: Episodes, *, warms_up: bool = False) -> Iterator[Finding]:
    """Checks the episodes of groups, sampled as in training.

    Args:
      warms_up: supervised steps come first in the run, and change what the policy writes: equal
        rewards and cut completions are notes then, not faults.
    """
    trajectories, failures = episodes.trajectories, episodes.failures
    total = sum(len(row) for row in episodes.results)
    if failures:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(failure.kind for failure in failures).items())
        severity = Severity.WARNING if trajectories else Severity.ERROR
        yield Finding(severity, PART, f"{len(failures)} of {total} episodes failed ({kinds}); the first: {failures[0].reason}")
    if not trajectories:
        yield Finding(Severity.ERROR, PART, f"none of {total} episodes has a reward", "see rollout.workflow and reward.name")
        return
    groups = [list(map(reward_of, row)) for row in episodes.by_prompt()]
    rewards = [reward for group in groups for reward in group]
    table = "\n".join(_histogram(rewards))
    yield Finding(Severity.NOTE, PART, f"{len(rewards)} episodes earn {statistics.fmean(rewards):.3g} on average\n{table}")
    judged = [*_spread([group for group in groups if len(group) > 1], rewards), *_cut(trajectories)]
    yield from map(_before_warmup, judged) if warms_up else judged


def _before_warmup(finding: Finding) -> Finding:
    """Returns what a finding means for a policy that is going to change before it samples."""
    good = finding.severity is Severity.GOOD
    line = f"before the warm-up, which a run makes first: {finding.line}"
    return Finding(Severity.GOOD if good else Severity.NOTE, finding.part, line)


def _cut(trajectories: Sequence[Trajectory]) -> Iterator[Finding]:
    """Warns if most completions were cut."""
    cut = statistics.fmean(trajectory.finish is Finish.LENGTH for trajectory in trajectories)
    if cut > MUCH_CUT:
        remedy = "raise gconfig.max_new_tokens, or see whether the policy ends its turns"
        yield Finding(Severity.WARNING, PART, f"{cut:.0%} of the completions are cut at the length limit", remedy)


def _spread(groups: list[list[float]], rewards: list[float]) -> Iterator[Finding]:
    """Judges whether groups have rewards that differ, from which advantages come."""
    if not groups:
        return
    mixed = sum(len(set(group)) > 1 for group in groups)
    if len(set(rewards)) == 1:
        line = f"all rewards are {rewards[0]:g}: every advantage is 0, and nothing is learned"
        remedy = "easier or harder prompts, a warm-up, or a reward with more than two values"
        yield Finding(Severity.ERROR if len(rewards) >= 64 else Severity.WARNING, PART, line, remedy)
    elif mixed < 0.1 * len(groups):
        line = f"in {mixed} of {len(groups)} groups the rewards differ: the others teach nothing"
        yield Finding(Severity.WARNING, PART, line, "prompts of middling difficulty, or more samples per prompt")
    else:
        yield Finding(Severity.GOOD, PART, f"in {mixed} of {len(groups)} groups the rewards differ")


def _histogram(rewards: list[float]) -> list[str]:
    values = np.asarray(rewards)
    different = np.unique(values)
    if len(different) <= 8:
        rows = [(f"{value:g}", int((values == value).sum())) for value in different]
    else:
        counts, edges = np.histogram(values, 8)
        rows = [(f"{edges[i]:.3g} to {edges[i + 1]:.3g}", int(count)) for i, count in enumerate(counts)]
    most, width = max(count for _, count in rows), max(len(name) for name, _ in rows)
    return [f"  {name:>{width}}  {'#' * int(np.ceil(BAR * count / most)):{BAR}}  {count}" for name, count in rows]
