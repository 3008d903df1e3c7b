"""Rewards of answers that are known: gold answers have to earn more than wrong ones."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np

from rljax.errors import EpisodeError, Rejected
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

    Answers are as they stand, or each in a box, for rewards that look for one: if more gold ones
    pass so, and not the wrong ones too. Prompts whose gold answer is rejected are left out, for the
    records' own check has told them.

    Args:
      prompts: prompts to take examples from, evenly.
      tokenizer: encodes completions for rewards that read token ids; None if there is none.
      field: the field with the text of a right completion.
      success: least reward of a completion that passes (`evaluator.success`).
    """
    chosen = [prompt for prompt in evenly(prompts, SAMPLES) if isinstance(prompt.fields.get(field), str)]
    if not chosen:
        return [Finding(Severity.NOTE, PART, f"no record has a text {field!r}, so that no gold answer was scored")]
    score = functools.partial(_score, rewards, tokenizer)
    scored = await _in_form("", score, chosen, field)
    if scored.passed(success) < len(chosen):
        boxed = await _in_form("\\boxed", score, chosen, field)
        if boxed.passed(success) > scored.passed(success) and boxed.tells_apart:
            scored = boxed
    if scored.failed:
        first = f"{len(scored.failed)} of {len(chosen)} gold answers could not be scored; the first: {scored.failed[0]}"
        return [Finding(Severity.ERROR, PART, first, "a right answer has to earn a number")]
    if not scored.prompts:
        return [Finding(Severity.ERROR, PART, f"all {len(chosen)} gold answers are rejected", "there is nothing to learn from")]
    empty, empty_failed = await _scored(score, [(prompt, "") for prompt in scored.prompts])
    failed = [*scored.wrong_failed, *empty_failed]
    return [*_of_gold(scored, success), *_of_wrong(scored.gold, scored.wrong), *_of_empty(scored.gold, empty, failed)]


@dataclasses.dataclass(frozen=True)
class _Answers:
    """Rewards of right and wrong answers in one form."""

    form: str  # "" as they stand, "\\boxed" in a box
    prompts: list[Prompt]  # those whose gold answer has a reward
    gold: list[float]
    failed: list[str]  # errors of gold answers, rejections left out
    wrong: list[float]
    wrong_failed: list[str]

    def passed(self, success: float) -> int:
        return sum(reward >= success for reward in self.gold)

    @property
    def tells_apart(self) -> bool:
        return not self.wrong or statistics.fmean(self.wrong) < statistics.fmean(self.gold)


async def _in_form(
    form: str, score: Callable[[Prompt, str], Awaitable[Score]], chosen: Sequence[Prompt], field: str
) -> _Answers:
    texts = [str(prompt.fields[field]) for prompt in chosen]
    if form:
        texts = [f"{form}{{{text.strip()}}}" for text in texts]
    results = await asyncio.gather(*(score(*pair) for pair in zip(chosen, texts, strict=True)), return_exceptions=True)
    failed = _errors([result for result in results if not isinstance(result, Rejected)])
    there = [(p, text, r.reward) for p, text, r in zip(chosen, texts, results, strict=True) if not isinstance(r, BaseException)]
    kept = [text for _, text, _ in there]
    others = [_other(i, kept) for i in range(len(there))]
    pairs = [(prompt, other) for (prompt, _, _), other in zip(there, others, strict=True) if other is not None]
    wrong, wrong_failed = await _scored(score, pairs)
    return _Answers(form, [prompt for prompt, _, _ in there], [reward for _, _, reward in there], failed, wrong, wrong_failed)


def _of_gold(scored: _Answers, success: float) -> Iterator[Finding]:
    gold, form = scored.gold, f", each in {scored.form}{{}}," if scored.form else ""
    low = [prompt for prompt, reward in zip(scored.prompts, gold, strict=True) if reward < success]
    spread = f"{min(gold):g} to {max(gold):g}, {len(gold)} prompts"
    figures = f"gold answers{form} earn {statistics.fmean(gold):.3g} on average ({spread})"
    if not low:
        yield Finding(Severity.GOOD, PART, figures)
        return
    severity = Severity.ERROR if len(low) == len(gold) else Severity.WARNING
    line = f"{figures}: {len(low)} less than evaluator.success={success:g}, as prompt {low[0].uid}"
    yield Finding(severity, PART, line, "they are in another form than the reward reads, or success is not 1 here")


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


def _other(index: int, texts: Sequence[str]) -> str | None:
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
    return [result.reward for result in results if not isinstance(result, BaseException)], _errors(results)


def _errors(results: Sequence[Score | BaseException]) -> list[str]:
    """Returns the errors of episodes, a line each. Raises any other."""
    unexpected = [r for r in results if isinstance(r, BaseException) and not isinstance(r, EpisodeError)]
    if unexpected:
        raise unexpected[0]
    return [" ".join(str(result).split()) for result in results if isinstance(result, EpisodeError)]


def evenly(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Returns at most `count` prompts, spread over all of them."""
    return [prompts[i * len(prompts) // count] for i in range(count)] if len(prompts) > count else list(prompts)
