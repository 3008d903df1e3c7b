"""Sanity of environments before they are trained on: their contract, and baselines with a verdict.

    remarks = await check_environments(prompts, timeout=60.0)

`experiments.check` shows the remarks.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rljax.diagnosis.rules.reward import tail_of
from rljax.diagnosis.thresholds import SATURATED
from rljax.environments.baselines import Baseline, expert_policy, random_policy, run_baseline
from rljax.environments.build import FIELD, Source, make_environment
from rljax.environments.play import Play
from rljax.errors import EnvironmentFailed, EnvironmentTimeout, UserError
from rljax.metrics.histogram import Histogram
from rljax.types import Prompt

EPISODES = 100  # of each baseline
MAX_TURNS = 200  # of an episode of a baseline
REPEATED = 4  # episodes that are played twice
STANDARD_ERRORS = 3.0  # that one policy is better than the other


class Remark(NamedTuple):
    """One line about an environment."""

    severity: str  # "error", "warning", "note", "good"
    line: str
    remedy: str = ""


async def check_environments(
    prompts: Sequence[Prompt], *, timeout: float = 60.0, episodes: int = EPISODES, discount: float = 1.0
) -> list[Remark]:
    """Checks the environments that prompts name; [] if none names one.

    Each environment (name and arguments) is played from the prompts that name it, the first of them
    again if they are fewer than `episodes`.

    Args:
      timeout: seconds for each call of an environment.
      episodes: episodes of each baseline.
      discount: `rollout.workflow_args.discount`.
    """
    sources: dict[str, list[tuple[Prompt, Source]]] = {}
    for prompt in prompts:
        if FIELD in prompt.fields:
            source = Source.of(prompt.fields, f"prompt {prompt.uid}")
            sources.setdefault(json.dumps([source.name, source.arguments], sort_keys=True), []).append((prompt, source))
    remarks = []
    for several in sources.values():
        name = several[0][1].name
        found = await _check_one(several, timeout=timeout, episodes=episodes, discount=discount)
        remarks += [remark._replace(line=f"{name}: {remark.line}") for remark in found]
    return remarks


async def _check_one(
    several: Sequence[tuple[Prompt, Source]], *, timeout: float, episodes: int, discount: float
) -> list[Remark]:
    try:
        environment = make_environment(several[0][1])
    except UserError as error:
        return [Remark("error", str(error))]
    except Exception as error:  # users' code may raise anything
        return [Remark("error", f"its constructor raised {type(error).__name__}: {error}")]
    contract = [remark async for remark in _contract(several, timeout)]
    if any(remark.severity == "error" for remark in contract):
        return contract
    played = [several[i % len(several)][1] for i in range(episodes)]
    baselines = []
    for name, policy, method in (
        ("a random policy", random_policy, "random_action"),
        ("the expert", expert_policy, "expert_action"),
    ):
        if callable(getattr(environment, method, None)):
            baselines.append(await run_baseline(name, policy, played, timeout=timeout, max_turns=MAX_TURNS, discount=discount))
        else:
            contract.append(
                Remark("note", f"no method {method}, so that {name} was not tried", "rljax/environments/interface.py")
            )
    return [*contract, *verdict(baselines)]


async def _contract(several: Sequence[tuple[Prompt, Source]], timeout: float) -> AsyncIterator[Remark]:
    """Yields remarks about reset and step: what they return, and that seeds give the same episode."""
    chosen = list(several[:REPEATED])
    for prompt, source in chosen:
        try:
            first, second = [await _transcript(source, timeout) for _ in range(2)]
        except (EnvironmentFailed, EnvironmentTimeout) as error:
            yield Remark("error", " ".join(str(error).split()))
            return
        if first != second:
            step = next(
                (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
            )
            what = "reset" if not step else f"step {step}"
            yield Remark(
                "error",
                f"seed {source.seed}: {what} differs between two episodes of the same actions",
                "draw all chance from the seed of reset; samples of a group must begin the same episode",
            )
            return
        seen = tuple(dict(message) for message in prompt.messages if message["role"] != "system")
        if first[0] != repr(seen):
            line = f"prompt {prompt.uid} is not what its reset returns: the policy would begin another episode than it sees"
            yield Remark("warning", line, "make the prompts again with this version of the environment")
            return
    yield Remark(
        "good", f"reset and step keep their contract, and the same seed gives the same episode ({len(chosen)} tried twice)"
    )


async def _transcript(source: Source, timeout: float) -> list[str]:
    """Returns what an episode shows and pays for actions that depend on the seed alone."""
    generator = random.Random(f"transcript/{source.seed}")
    async with Play(source, timeout=timeout) as play:
        shown = [repr(tuple(map(dict, await play.reset())))]
        draw = getattr(play.environment, "random_action", None)
        for _ in range(MAX_TURNS):
            action = await play.call("random_action", draw, generator) if callable(draw) else str(generator.randrange(10))
            step = await play.step(action)
            shown.append(repr((tuple(map(dict, step.observation)), step.reward, step.terminated, step.truncated)))  # type: ignore[arg-type]
            if step.terminated or step.truncated:
                break
    return shown


def verdict(baselines: Sequence[Baseline]) -> list[Remark]:
    """Judges what the policies earn: one by itself, and the expert (the last) against random."""
    remarks = [Remark("note", str(baseline)) for baseline in baselines]
    for baseline in baselines:
        remarks += _of_one(baseline)
    if len(baselines) == 2 and all(len(baseline.returns) for baseline in baselines):
        remarks += _of_both(*baselines)
    bad = any(remark.severity in ("error", "warning") for remark in remarks)
    return remarks if bad or not baselines else [*remarks, Remark("good", "rewards tell policies apart")]


def _of_one(baseline: Baseline) -> Iterator[Remark]:
    if baseline.failures:
        kinds = ", ".join(f"{count} {kind}" for kind, count in baseline.failures.items())
        yield Remark("error", f"{baseline.name}: {kinds}; the first: {baseline.first_failure}")
    if baseline.unfinished:
        line = f"{baseline.name}: {baseline.unfinished} episodes had not ended after {MAX_TURNS} turns"
        yield Remark("warning", line, "end them in the environment, or set rollout.workflow_args.max_turns")
    bins = Histogram.of(baseline.returns)
    tail = None if bins is None else tail_of(bins.edges, bins.counts)
    if tail is not None:
        body, whole = tail
        line = f"{baseline.name}: 19 of 20 returns lie within {body:.3g}, all of them within {whole:.3g}: a long tail"
        yield Remark("warning", line, "bound the reward, or set actor.reward_clip")


def _of_both(chance: Baseline, expert: Baseline) -> Iterator[Remark]:
    common, share = _most_common(chance.returns)
    gap, error = expert.mean - chance.mean, math.hypot(chance.error, expert.error)
    if share >= SATURATED and common > 0 and gap <= STANDARD_ERRORS * error:
        line = f"{share:.0%} of a random policy's returns are {common:g}, the best there is: anything is accepted"
        yield Remark("error", line, "make the task harder, or look for errors that are counted as successes")
    elif gap < -STANDARD_ERRORS * error or (error == 0 and gap < 0):
        line = f"the expert earns {expert.mean:.3g} and a random policy {chance.mean:.3g}: the sign is confused"
        yield Remark("error", line, "look for a cost that is used as a reward")
    elif gap <= STANDARD_ERRORS * error:
        line = f"the expert earns {expert.mean:.3g}, no more than a random policy with {chance.mean:.3g}"
        remedy = "the reward does not see what the expert does better, or episodes are too few to see it"
        yield Remark("error", line, f"{remedy}; almost all returns are {common:g}" if share >= SATURATED else remedy)
    elif share >= SATURATED:
        line = f"{share:.0%} of a random policy's returns are {common:g}: rewards are sparse"
        yield Remark("warning", line, "begin with demonstrations, with easier episodes, or joined midway")


def _most_common(returns: np.ndarray) -> tuple[float, float]:
    """Returns the most common value, and its share."""
    values, counts = np.unique(returns, return_counts=True)
    best = int(np.argmax(counts))
    return float(values[best]), float(counts[best] / len(returns))
