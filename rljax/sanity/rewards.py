"""Rewards of answers that are known: gold answers have to earn more than wrong ones."""

from __future__ import annotations

import asyncio
import functools
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from rljax.errors import EpisodeError
from rljax.hf.tokenizer import Tokenizer, prompt_ids_of
from rljax.rewards.score import Rewards, Sampled, Score, reads_ids
from rljax.sanity.findings import Finding, Severity
from rljax.types import Prompt

SAMPLES = 32  # prompts that are scored
PART = "reward"


async def check_rewards(
    rewards: Rewards, prompts: Sequence[Prompt], tokenizer: Tokenizer | None, *, field: str, success: float
) -> list[Finding]:
    """Scores each prompt's gold answer, that of another prompt, and an empty completion.

    Args:
      prompts: prompts to take examples from, evenly.
      tokenizer: encodes completions for rewards that read token ids; None if there is none.
      field: the field with the text of a right completion.
      success: least reward of a completion that passes (`evaluator.success`).
    """
    chosen = [prompt for prompt in evenly(prompts, SAMPLES) if isinstance(prompt.fields.get(field), str)]
    if not chosen:
        return [Finding(Severity.NOTE, PART, f"no record has a text {field!r}, so that no gold answer was scored")]
    texts = [str(prompt.fields[field]) for prompt in chosen]
    score = functools.partial(_score, rewards, tokenizer)
    gold, failed = await _scored(score, list(zip(chosen, texts, strict=True)))
    if failed:
        first = f"{len(failed)} of {len(chosen)} gold answers could not be scored; the first: {failed[0]}"
        return [Finding(Severity.ERROR, PART, first, "the reward raises on a right answer")]
    others = [_other(i, chosen, texts) for i in range(len(chosen))]
    wrong, wrong_failed = await _scored(score, [(p, t) for p, t in zip(chosen, others, strict=True) if t is not None])
    empty, empty_failed = await _scored(score, [(prompt, "") for prompt in chosen])
    return [*_of_gold(gold, chosen, success), *_of_wrong(gold, wrong), *_of_empty(gold, empty, [*wrong_failed, *empty_failed])]


def _of_gold(gold: Sequence[float], chosen: Sequence[Prompt], success: float) -> Iterator[Finding]:
    low = [prompt for prompt, reward in zip(chosen, gold, strict=True) if reward < success]
    figures = f"gold answers earn {statistics.fmean(gold):.3g} on average ({min(gold):g} to {max(gold):g}, {len(gold)} prompts)"
    if not low:
        yield Finding(Severity.GOOD, PART, figures)
        return
    severity = Severity.ERROR if len(low) == len(chosen) else Severity.WARNING
    line = f"{figures}: {len(low)} less than evaluator.success={success:g}, as prompt {low[0].uid}"
    yield Finding(severity, PART, line, "the gold answers are in another form than the reward reads, or success is not 1 here")


def _of_wrong(gold: Sequence[float], wrong: Sequence[float]) -> Iterator[Finding]:
    if not wrong:
        yield Finding(Severity.NOTE, PART, "all prompts have one answer, so that no wrong one was scored")
        return
    ours, theirs = statistics.fmean(gold), statistics.fmean(wrong)
    line = f"answers of other prompts earn {theirs:.3g} on average, gold ones {ours:.3g}"
    if theirs > ours:
        yield Finding(Severity.ERROR, PART, line, "the sign is confused: wrong answers are reinforced")
    elif theirs == ours:
        yield Finding(Severity.ERROR, PART, line, "the reward does not tell right from wrong")
    elif theirs > (ours + min(wrong)) / 2:
        yield Finding(Severity.WARNING, PART, line, "most wrong answers earn what right ones do")
    else:
        yield Finding(Severity.GOOD, PART, line)


def _of_empty(gold: Sequence[float], empty: Sequence[float], failed: Sequence[str]) -> Iterator[Finding]:
    if empty and statistics.fmean(empty) >= statistics.fmean(gold):
        line = f"an empty completion earns {statistics.fmean(empty):.3g} on average, a gold one {statistics.fmean(gold):.3g}"
        yield Finding(Severity.ERROR, PART, line, "saying nothing is reinforced")
    if failed:
        line = f"{len(failed)} wrong or empty completions could not be scored; the first: {failed[0]}"
        yield Finding(Severity.WARNING, PART, line, "a policy writes such completions; score them, and low")


def _other(index: int, chosen: Sequence[Prompt], texts: Sequence[str]) -> str | None:
    """Returns a gold answer that differs from that of a prompt; None if there is none."""
    following = [*texts[index + 1 :], *texts[:index]]
    return next((text for text in following if text.strip() != texts[index].strip()), None)


async def _score(rewards: Rewards, tokenizer: Tokenizer | None, prompt: Prompt, text: str) -> Score:
    """Scores a text, with the token ids that it has for rewards that read them."""
    if tokenizer is None or not reads_ids(rewards):
        return await rewards.score(prompt, text)
    sampled = Sampled.of(tokenizer, prompt_ids_of(tokenizer, prompt), np.array(tokenizer.encode(text), np.int32))
    return await rewards.score(prompt, text, sampled)


async def _scored(
    score: Callable[[Prompt, str], Awaitable[Score]], pairs: Sequence[tuple[Prompt, str]]
) -> tuple[list[float], list[str]]:
    """Returns the rewards of completions, and the errors of those that have none."""
    results = await asyncio.gather(*(score(*pair) for pair in pairs), return_exceptions=True)
    unexpected = [r for r in results if isinstance(r, BaseException) and not isinstance(r, EpisodeError)]
    if unexpected:
        raise unexpected[0]
    found = [result.reward for result in results if not isinstance(result, BaseException)]
    return found, [" ".join(str(result).split()) for result in results if isinstance(result, EpisodeError)]


def evenly(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Returns at most `count` prompts, spread over all of them."""
    return [prompts[i * len(prompts) // count] for i in range(count)] if len(prompts) > count else list(prompts)
