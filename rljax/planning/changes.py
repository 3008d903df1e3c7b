"""Configs that need less memory than a plan's, and the largest that fits."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from rljax.config.allocation import Allocation
from rljax.config.checks import check
from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.planning.estimate import SAMPLER, Plan, Request, plan

RANK = 16  # of the adapters that are tried
CHUNKS = (1024, 512)  # rows of logits
HALVINGS = 24  # of a number, at most
STEP = 128  # tokens by which row lengths are tried
MOST_ROWS, MOST_TOKENS = 1024, 1 << 20


@dataclasses.dataclass(frozen=True)
class Change:
    """Another value of a config's key, and what becomes of the plan with it."""

    key: str
    value: object
    saved: float  # bytes at the fullest moment of the group of devices that gains most; if none gains, that loses most
    plan: Plan

    def __str__(self) -> str:
        """Returns the flag that makes the change, as a shell takes it."""
        return f"--config.{self.key}={shlex.quote(str(self.value))}"


def changes(before: Plan) -> list[Change]:
    """Returns the single changes that save memory and that a run takes, the one that saves most
    first.

    A number is halved, and doubled shards are doubled again, until the config fits. Of a number
    that makes it fit nowhere the first half that saves something is returned, of allocations all.
    What makes the config just fit is computed where the engine can do it, and returned even if it
    saves nothing: a server that doesn't start may need more.
    """
    just = _just_fitting(before)
    smaller = {key: value for key, value in _smaller(before, before.request.config).items() if key not in just}
    single = (_halved(before, key, value) for key, value in smaller.items())
    found = [*just.values(), *(change for change in single if change is not None)]
    times = 2
    while times <= before.request.topology.devices:
        tried = (_change(before, "allocation_mode", str(wide)) for wide in _more_shards(before, times))
        wider = [change for change in tried if change is not None and change.saved > 0]
        found += wider
        if any(change.plan.fits for change in wider):
            break
        times *= 2
    return sorted(found, key=lambda change: -change.saved)


def _just_fitting(before: Plan) -> dict[str, Change]:
    """Returns by key the changes of the sampler's own section with which the config just fits."""
    pool, sampler, request = before.allocation.sampler, before.sampler, before.request
    if pool is None or sampler is None or before.fits:
        return {}
    planner = request.find(pool.engine).planner()
    group = next(group for group in before.groups if SAMPLER in group.name)
    values = {} if planner is None else planner.fitting(request.config, sampler, request.topology.chip, group.margin)
    found = {key: _change(before, key, value) for key, value in values.items()}
    return {key: change for key, change in found.items() if change is not None and change.plan.fits}


def planned(before: Plan, key: str, value: object) -> Plan | None:
    """Plans the config with another value of a key; None if no run takes it, such as a split that
    the model doesn't have, or more devices than there are.
    """
    try:
        config = changed(before.request, key, value)
        check(config)
        return plan(dataclasses.replace(before.request, config=config))
    except UserError:
        return None


def _change(before: Plan, key: str, value: object) -> Change | None:
    """Returns the change, whether it saves something or not; None if no run takes it, or if the
    sampler would not start any more.
    """
    after = planned(before, key, value)
    if after is None or _problems(after) > _problems(before):
        return None
    peaks = {group.name: group.footprint.peak for group in after.groups}
    gains = [group.footprint.peak - peaks[group.name] for group in before.groups]
    return Change(key, value, max(gains) if max(gains) > 0 else min(gains), after)


def _problems(made: Plan) -> int:
    return sum(bool(group.problem) for group in made.groups)


def _halved(before: Plan, key: str, value: object) -> Change | None:
    """Returns the change to the first value that fits, of this one and those below it; if none
    fits, to the first that saves memory. None if none saves any.
    """
    first = None
    for _ in range(HALVINGS):
        change = _change(before, key, value)
        if change is not None and change.plan.fits:
            return change if change.saved > 0 else first
        if change is not None and change.saved > 0:
            first = first or change
        further = _smaller(before, changed(before.request, key, value)).get(key)
        if further is None:
            break
        value = further
    return first


def changed(request: Request, key: str, value: object) -> Config:
    """Returns the config with another value of a key such as "actor.lora.rank" or "jax.slots"."""
    first, _, rest = key.partition(".")
    config = request.config
    if not rest or first in {field.name for field in dataclasses.fields(config)}:
        return _replaced(config, key.split("."), value)
    section = request.find(first).config_class
    assert section is not None  # the key is of an engine's section
    engines = {**config.engines, first: dataclasses.replace(section.of(config), **{rest: value})}
    return dataclasses.replace(config, engines=engines)


def _replaced(tree: Any, path: Sequence[str], value: object) -> Any:
    first, *rest = path
    return dataclasses.replace(tree, **{first: _replaced(getattr(tree, first), rest, value) if rest else value})


def _smaller(before: Plan, config: Config) -> dict[str, object]:
    """Returns keys of a config of the plan's allocation, and for each its next value that may take
    less memory.
    """
    found: dict[str, object] = {}
    actor, rows = config.actor, config.actor.mb_spec
    if before.learner is not None:
        if actor.lora.rank == 0:
            found["actor.lora.rank"] = RANK
        if before.learner.remat != "full" != actor.gradient_checkpointing:
            found["actor.gradient_checkpointing"] = "full"
        if actor.dtype != "bfloat16":
            found["actor.dtype"] = "bfloat16"
        if rows.rows_per_mb > 1:
            found["actor.mb_spec.rows_per_mb"] = rows.rows_per_mb // 2
        if rows.max_tokens_per_row // 2 >= _shortest_row(before):
            found["actor.mb_spec.max_tokens_per_row"] = rows.max_tokens_per_row // 2
        if shorter := [chunk for chunk in CHUNKS if chunk < (actor.logprob_chunk or 2 * CHUNKS[0])]:
            found["actor.logprob_chunk"] = shorter[0]
        if actor.kl_ctl > 0:
            found["actor.kl_ctl"] = 0.0
        if actor.adv_estimator == "gae":
            found["actor.adv_estimator"] = "grpo"
    pools = filter(None, (before.allocation.sampler, before.allocation.learner))
    for engine in dict.fromkeys(pool.engine for pool in pools):
        planner = before.request.find(engine).planner()
        found |= {} if planner is None else planner.smaller(config)
    return found


def _shortest_row(before: Plan) -> int:
    """Returns the tokens of a row that holds the plan's average prompt and the longest that the
    data may have, with the longest completion.
    """
    config = before.request.config
    return max(before.request.load.prompt, config.train_dataset.max_length or 1) + config.gconfig.max_new_tokens


def _more_shards(before: Plan, times: int) -> Iterator[Allocation]:
    """Yields allocations whose learner, or whose both sides, are split over so many times the
    devices, and those with copies of the data turned into shards.
    """
    sampler, learner = before.allocation.sampler, before.allocation.learner
    if learner is None:
        return
    wide = dataclasses.replace(learner, fsdp=times * learner.fsdp)
    sharded = dataclasses.replace(learner, fsdp=learner.data * learner.fsdp, data=1)
    whole = sampler == learner
    if learner.data > 1 and times == 2:
        yield Allocation(sharded if whole else sampler, sharded)
    if sampler is not None and not whole and sampler.first_device == learner.first_device:
        sampler = dataclasses.replace(sampler, data=times * sampler.data)
    yield Allocation(wide if whole else sampler, wide)
    if sampler is not None and not whole and before.allocation.sampler is not None:
        split = dataclasses.replace(before.allocation.sampler, tensor=times * before.allocation.sampler.tensor)
        if split.first_device == learner.first_device:
            yield Allocation(split, wide)
        else:
            yield Allocation(split, learner)


def largest(before: Plan, key: str, least: int, step: int, most: int) -> int | None:
    """Returns the largest value from `least` to `most` with which a key's config fits: a multiple
    of `step`, or the config's own, or a smaller one if no multiple fits. None if none does.

    Memory rises with the key.
    """
    round_ = step * -(-least // step)  # the first multiple
    small, multiples = range(least, min(round_, most + 1)), range(round_, most + 1, step)

    def fits(value: int) -> bool:
        after = planned(before, key, value)
        return after is not None and after.fits

    values = multiples if multiples and fits(multiples[0]) else small
    found = _last(values, fits)
    own = int(attrgetter(key)(before.request.config))
    return max(found or 0, own) if before.fits else found


def _last(values: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the last of the values that fits, where each fits that is before one that does."""
    if not values or not fits(values[0]):
        return None
    low, high = 0, 1
    while high < len(values) and fits(values[high]):
        low, high = high, 2 * high
    high = min(high, len(values))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(values[middle]) else (low, middle)
    return values[low]


def largest_rows(before: Plan) -> int | None:
    """Returns the most rows of a micro-batch that fit."""
    return largest(before, "actor.mb_spec.rows_per_mb", 1, 1, MOST_ROWS)


def longest_row(before: Plan) -> int | None:
    """Returns the longest row that fits with the config's rows per micro-batch, and that holds an
    episode.
    """
    return largest(before, "actor.mb_spec.max_tokens_per_row", _shortest_row(before), STEP, MOST_TOKENS)
