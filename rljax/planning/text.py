"""A plan as text for a screen, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rljax.chips import GIB
from rljax.config.schema import Config
from rljax.planning.balance import balanced
from rljax.planning.changes import MOST_ROWS, MOST_TOKENS, Change, changes, largest_rows, longest_row
from rljax.planning.counted import counted
from rljax.planning.estimate import SAMPLER, Group, Plan

CHANGES = 8  # lines of changes, at most
LAUNCHES = 1e-3  # seconds of a decode step, about, below which it is not the memory that is waited for


@dataclasses.dataclass(frozen=True)
class Report:
    """A plan, what would need less, the largest micro-batch that fits, and the best split."""

    plan: Plan
    changes: Sequence[Change]
    rows: int | None  # most rows of a micro-batch; None if not even one fits, or there is no learner
    tokens: int | None  # longest row; None likewise
    balanced: Plan | None  # split of all devices with the shortest step; None if none fits, or nobody waits

    @classmethod
    def of(cls, plan: Plan, host: int | None = None) -> Report:
        """Looks for changes, the largest micro-batch and the best split.

        host: devices of a host; None: all are of one.
        """
        rows, tokens = (None, None) if plan.learner is None else (largest_rows(plan), longest_row(plan))
        return cls(plan, changes(plan), rows, tokens, balanced(plan, host))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        plan, request = self.plan, self.plan.request
        chip, load = request.topology.chip, request.load
        devices = f"{counted(request.topology.devices, 'device')} of {_gib(request.topology.memory)}"
        yield f"{request.topology.name}: {devices}, {plan.allocation}"
        if request.elsewhere:
            yield f"  the sampler is {request.elsewhere}, which is not planned for"
        yield f"  {_trained(request.config)}"
        if plan.learner is not None and plan.learner.note:
            yield f"  {plan.learner.note}"
        yield f"  prompts of {load.prompt} tokens, completions of {load.completion} (--prompt_tokens, --completion_tokens)"
        for group in plan.groups:
            yield from _group_lines(group)
        yield from self._rate_lines()
        yield from self._size_lines()
        for change in self.changes[:CHANGES]:
            saved = f"{_gib(abs(change.saved)):>10} {'less' if change.saved >= 0 else 'more'}"
            yield f"  {saved}, {_verdict(change.plan):12}  {change}"
        yield f"verdict: {_verdict(plan)} on {request.topology.name} ({chip.name}), {_margins(plan.groups)}"

    def _size_lines(self) -> Iterator[str]:
        if self.plan.learner is None:
            return
        if self.rows is None and self.tokens is None:
            yield f"  no micro-batch makes it fit{self._apart()}"
            return
        rows, tokens = _largest(self.rows, MOST_ROWS), _largest(self.tokens, MOST_TOKENS)
        yield f"  largest that fits: actor.mb_spec.rows_per_mb={rows}, or .max_tokens_per_row={tokens}"

    def _apart(self) -> str:
        """Says what of the sampler is the matter, whatever the learner takes; "" if nothing is."""
        for group in self.plan.groups:
            if group.problem:
                return ": the sampler does not start"
            if group.name == SAMPLER and not group.fits:
                return ": the sampler's devices are too full"
        return ""

    def _rate_lines(self) -> Iterator[str]:
        rates = self.plan.rates
        if rates is None:
            return
        if rates.learner_seconds:
            yield f"  learner: {rates.learner_tokens:,.0f} tokens/s, {rates.learner_seconds:.3g} s per step"
        if any(group.problem for group in self.plan.groups):
            yield "  sampler: no rate, as it does not start"
            return
        if rates.sampler_seconds:
            yield (
                f"  sampler: {rates.sampler_tokens:,.0f} tokens/s, {rates.sampler_seconds:.3g} s per step;"
                f" {rates.requests} requests at once, {1e3 * rates.decode_seconds:.3g} ms per token of each"
            )
        if 0 < rates.decode_seconds < LAUNCHES:
            yield "  these times are too short: a model this small waits for kernel launches and the host"
        if rates.waits:
            yield f"  the {rates.waits} waits; {self._split_line()}"
        if rates.sampler_seconds and rates.learner_seconds:
            yield (
                f"  a longest completion takes the time of {counted(rates.lag, 'step')}:"
                f" with a rollout.max_head_offpolicyness of {rates.lag} or more nobody waits for it"
            )
        hours = "total_train_steps is not set" if rates.device_hours is None else f"{rates.device_hours:.3g} device-hours"
        yield f"  step: {rates.step_seconds:.3g} s; run: {hours}"

    def _split_line(self) -> str:
        better, devices = self.balanced, self.plan.request.topology.devices
        if better is None:
            return f"no split of the {counted(devices, 'device')} fits"
        assert better.rates is not None and self.plan.rates is not None  # one waits for the other
        if better.rates.step_seconds >= self.plan.rates.step_seconds:
            return f"no split of the {counted(devices, 'device')} that fits has a shorter step"
        return f"balanced: --config.allocation_mode='{better.allocation}', {better.rates.step_seconds:.3g} s per step"

    def json(self) -> dict[str, Any]:
        """Returns the report as plain values, bytes per device and seconds."""
        return plan_json(self.plan) | {
            "largest_rows_per_mb": self.rows,
            "largest_max_tokens_per_row": self.tokens,
            "balanced": None if self.balanced is None else str(self.balanced.allocation),
            "changes": [
                {"key": change.key, "value": change.value, "saved": change.saved, "fits": change.plan.fits}
                for change in self.changes
            ],
        }


def _trained(config: Config) -> str:
    """Says the dtype and sizes of a config in a line: it may have them from another one."""
    rows = config.actor.mb_spec
    return (
        f"{config.actor.dtype}; micro-batches of {rows.rows_per_mb} x {rows.max_tokens_per_row} tokens;"
        f" steps of {config.batch_size} prompts, {config.gconfig.n_samples} completions each,"
        f" of up to {config.gconfig.max_new_tokens} tokens"
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns a plan as plain values, bytes per device and seconds."""
    request = plan.request
    return {
        "topology": request.topology.name,
        "allocation": str(plan.allocation),
        "fits": plan.fits,
        "gradient_checkpointing": None if plan.learner is None else plan.learner.remat,
        "dtype": request.config.actor.dtype,
        "prompt_tokens": request.load.prompt,
        "completion_tokens": request.load.completion,
        "groups": [_group_json(group) for group in plan.groups],
        "rates": None if plan.rates is None else dataclasses.asdict(plan.rates),
    }


def _group_lines(group: Group) -> Iterator[str]:
    footprint = group.footprint
    peak = f"{_gib(footprint.peak)} of {_gib(group.usable)}"
    yield f"  {group.name}, {counted(group.devices, 'device')}: {peak}, fullest: {footprint.fullest}"
    for name, size in footprint.components.items():
        yield f"    {name:36} {_gib(size):>10}"
    if group.problem:
        yield f"    does not start: {group.problem}"


def _group_json(group: Group) -> dict[str, Any]:
    footprint = group.footprint
    moments = {name: footprint.held + sum(parts.values()) for name, parts in footprint.moments.items()}
    return {
        "name": group.name,
        "devices": group.devices,
        "peak": footprint.peak,
        "usable": None if math.isinf(group.usable) else group.usable,
        "fullest": footprint.fullest,
        "in_turn": group.in_turn,
        "problem": group.problem,
        "components": footprint.components,
        "moments": moments,
    }


def _verdict(plan: Plan) -> str:
    return "fits" if plan.fits else "does not fit"


def _margins(groups: Sequence[Group]) -> str:
    return ", ".join(f"{group.name}: {_margin(group)}" for group in groups)


def _margin(group: Group) -> str:
    share = 100 * abs(group.margin) / group.usable
    left = f"{_gib(abs(group.margin))} {'left' if group.margin >= 0 else 'too much'} ({share:.0f}%)"
    return f"{left}, and does not start" if group.problem else left


def _largest(count: int | None, most: int) -> str:
    """Returns the largest that was found, of those up to `most`."""
    return "none" if count is None else f"{count} or more" if count >= most else str(count)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / (1 << 20):.2f} MiB"
