"""Environment and data: prompts, episodes, and what of them reaches the loss."""

from __future__ import annotations

import dataclasses

import numpy as np

from rljax.diagnosis import names
from rljax.diagnosis.evidence import above, below, standing
from rljax.diagnosis.finding import Severity
from rljax.diagnosis.history import History
from rljax.diagnosis.rule import Rule, Sign, rule
from rljax.diagnosis.series import Series, trend
from rljax.diagnosis.thresholds import (
    BROKEN_DUPLICATES,
    BROKEN_FAILURES,
    BROKEN_TRUNCATION,
    LONE,
    MAX_DUPLICATES,
    MAX_FAILURES,
    MAX_TIMEOUTS,
    MAX_TRUNCATION,
    PATIENCE,
    SIGNIFICANCE,
    SMALL_GROUPS,
)

OF_RECORDS = ("rlvr", "multi_turn", "tool_use")  # workflows whose prompt is that of the record, and tells records apart


@rule(
    "environment.foreign_tokens",
    "Tokens that no sampler drew are trained on: padding, prompt, or what an environment or tool answered.",
    needs=(names.FOREIGN_TOKENS,),
    causes=(
        "the workflow's loss mask covers prompt, padding or environment tokens",
        "a workflow tokenizes text again in place of the sampled ids",
        "the sampler returned log-probs that are not finite",
    ),
    next="rljax rollout --config=CONFIG --out=DIR, then read loss_mask beside versions in DIR/batch.safetensors",
)
def foreign_tokens(history: History) -> Sign | None:
    series = history[names.FOREIGN_TOKENS]
    found = series.where(series.values > 0)
    if found:
        line = f"{series.name} is {found.values[0]:.0f} at step {found.steps[0]}; {len(found)} of {len(series)} steps have them"
        return Sign(Severity.BROKEN, int(found.steps[0]), line)
    return _longer_than_sampled(history)


def _longer_than_sampled(history: History) -> Sign | None:
    """Finds completions of a single turn that have more tokens than the sampler may draw."""
    if history.config is None or history.config.rollout.workflow != "rlvr":
        return None
    limit, longest = history.config.gconfig.max_new_tokens, history[f"{names.SEQUENCE_LENGTH}/max"]
    found = longest.where(longest.values > limit)
    if not found:
        return None
    line = (
        f"a completion has {found.values[0]:.0f} tokens at step {found.steps[0]}, where the sampler draws at most {limit} "
        f"(gconfig.max_new_tokens): tokens that it did not draw pass for sampled ones"
    )
    return Sign(Severity.BROKEN, int(found.steps[0]), line, series=(longest.name,))


@rule(
    "environment.truncation",
    "Many completions are cut at the length limit, so that their reward says little of their answer.",
    needs=(names.NO_EOS_RATIO,),
    least=PATIENCE,
    bounds=(MAX_TRUNCATION, BROKEN_TRUNCATION),
    causes=(
        "gconfig.max_new_tokens is too small for the task",
        "the stop token is missing from gconfig.stop_token_ids or the chat template",
        "the policy does not stop: a base model, or one that is rewarded for length",
    ),
    next="rljax train with gconfig.max_new_tokens doubled; with actor.mask_no_eos=true if that is too slow",
)
def truncation(history: History) -> Sign | None:
    series = history[names.NO_EOS_RATIO]
    broken = above(series, BROKEN_TRUNCATION, Severity.BROKEN, window=2 * PATIENCE)
    falling = trend(series).falls(SIGNIFICANCE) and series.tail(PATIENCE).median < series.head(PATIENCE).median / 2
    severity = Severity.NOTE if falling else Severity.WARNING
    strain = above(series, MAX_TRUNCATION, severity, window=2 * PATIENCE)
    return strain if falling else standing(broken, strain)


@rule(
    "environment.duplicate_prompts",
    "Batches hold the same prompt several times, so that they are smaller than they look.",
    needs=(names.DUPLICATE_PROMPTS,),
    least=PATIENCE,
    applies=lambda config: config.rollout.workflow in OF_RECORDS,  # elsewhere one text begins many different episodes
    bounds=(MAX_DUPLICATES, BROKEN_DUPLICATES),
    causes=(
        "the data has duplicates, or fewer prompts than a batch",
        "the prompt template drops what tells records apart",
        "several workers draw the same prompts",
    ),
    next="count distinct prompts of the training file; set train_dataset.batch_size below that number",
)
def duplicate_prompts(history: History) -> Sign | None:
    series = history[names.DUPLICATE_PROMPTS]
    return standing(above(series, BROKEN_DUPLICATES, Severity.BROKEN), above(series, MAX_DUPLICATES, Severity.WARNING))


@rule(
    "environment.small_groups",
    "Groups have fewer episodes than gconfig.n_samples: one that is alone is compared with nothing, and teaches nothing.",
    needs=(names.GROUP_SIZE,),
    needs_config=True,
    least=PATIENCE,
    applies=lambda config: config.gconfig.n_samples > 1,
    bounds=(LONE, SMALL_GROUPS),
    causes=(
        "the workflow returns None for most episodes of a prompt",
        "most episodes fail: see environment.failures",
    ),
    next="rljax rollout --config=CONFIG --out=DIR, and count the episodes of each prompt",
)
def small_groups(history: History) -> Sign | None:
    assert history.config is not None
    size, samples = history[names.GROUP_SIZE], history.config.gconfig.n_samples
    sign = standing(below(size, LONE, Severity.BROKEN), below(size, SMALL_GROUPS * samples, Severity.WARNING))
    return None if sign is None else dataclasses.replace(sign, evidence=f"{sign.evidence}, of gconfig.n_samples={samples}")


@rule(
    "environment.failures",
    "Many episodes fail: what is trained on is the part of the task that does not.",
    needs=(names.GROUPS,),
    bounds=(MAX_FAILURES, BROKEN_FAILURES),
    causes=(
        "the reward raises or times out (reward.timeout)",
        "servers are lost or overloaded",
        "the workflow raises on some prompts",
    ),
    next="rljax rollout --config=CONFIG --out=DIR on the same prompts, and read the first warning of the run's log",
)
def failures(history: History) -> Sign | None:
    kinds = [name for name in history.names(names.FAILED)]
    groups = history[names.GROUPS]
    if not kinds:
        return None
    failed = np.zeros(len(groups))
    for kind in kinds:
        counts = history[kind]
        failed[np.isin(groups.steps, counts.steps)] += counts.values[np.isin(counts.steps, groups.steps)]
    samples = history.config.gconfig.n_samples if history.config else 1
    share = Series("failed episodes per episode", groups.steps, failed / (failed + np.maximum(groups.values, 1) * samples))
    sign = standing(above(share, BROKEN_FAILURES, Severity.BROKEN), above(share, MAX_FAILURES, Severity.WARNING))
    if sign is None:
        return None
    totals = ", ".join(f"{kind} {history[kind].values.sum():.0f}" for kind in kinds)
    return dataclasses.replace(sign, evidence=(str(sign.evidence), f"in all: {totals}"), series=tuple(kinds))


@rule(
    "environment.timeouts_as_zeros",
    "Rewards run out of time and come back as a score: a timeout passes for a wrong answer.",
    needs=(names.REWARD_SECONDS,),
    bounds=(MAX_TIMEOUTS,),
    causes=("the workflow or the reward catches its timeout and returns 0", "a sandbox behind the reward does"),
    next="let the timeout raise, so that its episode fails and is counted in rollout/failed/reward_timeout",
)
def timeouts_as_zeros(history: History) -> Sign | None:
    """Compares attempts that timed out with episodes that failed of it.

    An attempt that is repeated and times out again fails its episode, unless somebody scored it.
    """
    retried, groups = history[names.RETRIED_TIMEOUTS], history[names.GROUPS]
    failed = history[names.FAILED_TIMEOUTS].values.sum()
    episodes = groups.values.sum() * (history.config.gconfig.n_samples if history.config else 1)
    found = retried.where(retried.values > 0)
    if len(found) < PATIENCE or failed or retried.values.sum() < MAX_TIMEOUTS * episodes:
        return None
    line = (
        f"{retried.values.sum():.0f} calls of the reward timed out from step {found.steps[0]} on, at {len(found)} steps "
        f"({retried.values.sum() / episodes:.1%} of the episodes), and no episode failed of it"
    )
    return Sign(Severity.BROKEN, int(found.steps[0]), line, series=(names.RETRIED_TIMEOUTS,))


RULES: tuple[Rule, ...] = (foreign_tokens, truncation, duplicate_prompts, small_groups, failures, timeouts_as_zeros)
