"""Configs that need less memory than a plan's, and the largest that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rljax.config.allocation import Allocation
from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.planning.estimate import Plan, Request, plan

RANK = 16  # of the adapters that are tried
STEP = 128  # tokens by which row lengths are tried
MOST_ROWS, MOST_TOKENS = 1024, 1 << 20


@dataclasses.dataclass(frozen=True)
class Change:
    """Another value of a config's key, and what becomes of the plan with it."""

    key: str
    value: object
    saved: float  # bytes at the fullest moment of the group of devices that gains most
    plan: Plan

    def __str__(self) -> str:
        """Returns the flag that makes the change."""
        return f"--config.{self.key}={self.value}"


def changes(before: Plan) -> list[Change]:
    """Returns the single changes that save memory, the one that saves most first.

    Of allocations those with twice the shards, four times and so on, until one fits.
    """
    found = list(_saving(before, _candidates(before)))
    times = 2
    while times <= before.request.topology.devices:
        wider = list(_saving(before, (("allocation_mode", str(wide)) for wide in _more_shards(before, times))))
        found += wider
        if any(change.plan.fits for change in wider):
            break
        times *= 2
    return sorted(found, key=lambda change: -change.saved)


def _saving(before: Plan, candidates: Iterable[tuple[str, object]]) -> Iterator[Change]:
    """Yields those of the keys and values that save memory."""
    for key, value in candidates:
        try:
            after = plan(dataclasses.replace(before.request, config=changed(before.request, key, value)))
        except UserError:  # a split that the model doesn't have, more devices than there are, a key that a run refuses
            continue
        if sum(bool(group.problem) for group in after.groups) > sum(bool(group.problem) for group in before.groups):
            continue  # less memory, of which the sampler does not start
        peaks = {group.name: group.footprint.peak for group in after.groups}
        saved = max(group.footprint.peak - peaks[group.name] for group in before.groups)
        if saved > 0:
            yield Change(key, value, saved, after)


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


def _candidates(before: Plan) -> Iterator[tuple[str, object]]:
    """Yields keys and values that may save memory."""
    config, load = before.request.config, before.request.load
    actor, rows = config.actor, config.actor.mb_spec
    if before.learner is not None:
        if actor.lora.rank == 0:
            yield "actor.lora.rank", RANK
        if before.learner.remat != "full":
            yield "actor.gradient_checkpointing", "full"
        if actor.dtype != "bfloat16":
            yield "actor.dtype", "bfloat16"
        if rows.rows_per_mb > 1:
            yield "actor.mb_spec.rows_per_mb", rows.rows_per_mb // 2
        if rows.max_tokens_per_row // 2 >= load.prompt + config.gconfig.max_new_tokens:
            yield "actor.mb_spec.max_tokens_per_row", rows.max_tokens_per_row // 2
        yield from (("actor.logprob_chunk", chunk) for chunk in (1024, 512) if chunk < (actor.logprob_chunk or 2048))
        if actor.kl_ctl > 0:
            yield "actor.kl_ctl", 0.0
        if actor.adv_estimator == "gae":
            yield "actor.adv_estimator", "grpo"
    pools = filter(None, (before.allocation.sampler, before.allocation.learner))
    for engine in dict.fromkeys(pool.engine for pool in pools):
        planner = before.request.find(engine).planner()
        yield from {} if planner is None else planner.smaller(config).items()


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


def largest(before: Plan, key: str, step: int, most: int) -> int | None:
    """Returns the largest multiple of `step` up to `most` with which a key's config fits; None if
    none does.

    Memory rises with the key.
    """

    def fits(count: int) -> bool:
        return plan(dataclasses.replace(before.request, config=changed(before.request, key, count * step))).fits

    if not fits(1):
        return None
    low, high = 1, 2
    while high * step <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low * step, most)


def largest_rows(before: Plan) -> int | None:
    """Returns the most rows of a micro-batch that fit."""
    return largest(before, "actor.mb_spec.rows_per_mb", 1, MOST_ROWS)


def longest_row(before: Plan) -> int | None:
    """Returns the longest row that fits with the config's rows per micro-batch."""
    return largest(before, "actor.mb_spec.max_tokens_per_row", STEP, MOST_TOKENS)
