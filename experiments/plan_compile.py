"""Programs of a plan, compiled or tried without its devices: their peaks beside the estimate."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rljax.chips import GIB
from rljax.config.allocation import Pool
from rljax.engine import find_plugin
from rljax.errors import UserError
from rljax.hf.companion_files import write_companions
from rljax.planning.changes import changed
from rljax.planning.estimate import Plan, Request
from rljax.planning.estimate import plan as estimate
from rljax.planning.footprint import Footprint
from rljax.planning.planner import Planner
from rljax.planning.program import Program

LARGEST = 3  # components named where a program does not fit


@dataclasses.dataclass(frozen=True)
class Checked:
    """A program of a plan beside the plan's estimate of it."""

    topology: str
    side: str
    program: Program
    usable: float  # bytes of a device
    estimate: float | None  # bytes; None for programs that the plan has no estimate of
    shrink: str  # the estimate's largest components

    @property
    def fits(self) -> bool:
        return self.program.peak is not None and self.program.peak <= self.usable

    @property
    def name(self) -> str:
        return f"{self.side} {self.program.name}"

    def __str__(self) -> str:
        program = self.program
        if program.peak is None:
            return f"  {self.name}: does not fit: {program.problem}; {self.shrink}"
        beside = "" if self.estimate is None else f", estimated {self.estimate / GIB:.2f}"
        found = [f"{count} {name}" for name, count in (*program.kernels.items(), *program.collectives.items())]
        found += [f"{name} {size / GIB:.2f} GiB" for name, size in program.components.items()]
        verdict = "" if self.fits else f"; does not fit, {self.shrink}"
        return (
            f"  {self.name}: {program.peak / GIB:.2f} GiB of {self.usable / GIB:.2f}{beside}; {program.how}:"
            f" {', '.join(found) or 'no kernels or collectives'}; {program.seconds:.0f} s{verdict}"
        )

    def json(self) -> dict[str, Any]:
        """Returns the program as plain values, and whether it fits."""
        rest = {"side": self.side, "usable": self.usable, "estimate": self.estimate, "fits": self.fits}
        return dataclasses.asdict(self.program) | rest


class Selection:
    """Chooses programs by a regular expression, and remembers the names that it was asked for."""

    def __init__(self, only: str) -> None:
        """
        Args:
          only: names of programs have to match all of it; empty: every one does.

        Raises UserError if it is no regular expression.
        """
        try:
            self._pattern = re.compile(only or ".*")
        except re.error as error:
            raise UserError(f"--programs: {only!r} is no regular expression: {error} (as in 'update|decode')") from None
        self._only, self._names = only, dict[str, bool]()

    def __call__(self, name: str) -> bool:
        self._names[name] = self._pattern.fullmatch(name) is not None
        return self._names[name]

    def check(self, engines: object) -> None:
        """Raises UserError if no program was chosen."""
        if not self._names:
            raise UserError(f"--compile: the engines of {engines} have no programs that can be compiled without devices")
        if not any(self._names.values()):
            raise UserError(f"--programs: {self._only!r} matches no program of {engines} (one of {', '.join(self._names)})")


def require_compilers(plans: Iterable[Plan]) -> None:
    """Checks that all programs of plans can be compiled here. Raises UserError."""
    for plan in plans:
        for _, pool, _ in _sides(plan):
            _planner_of(pool).require_compiler(plan.request.topology)


def compile_plan(plan: Plan, only: str = "") -> Iterator[Checked]:
    """Compiles or tries the programs of both sides of a plan, one by one.

    only: regular expression that names of programs have to match; empty: all.

    Raises UserError for devices that can't be compiled for, for a program that lacks the kernel of
    its attention, or where there are no programs to compile.
    """
    request, selection = plan.request, Selection(only)
    with tempfile.TemporaryDirectory() as directory:
        write_companions(Path(directory), request.spec, request.config.actor.dtype, None)
        for side, pool, footprint in _sides(plan):
            planner = _planner_of(pool)
            usable, compared = planner.usable(request.topology.chip), _full(request) if side == "learner" else footprint
            for program in planner.programs(side, request.config, pool, request.topology, Path(directory), selection):
                yield Checked(
                    request.topology.name, side, program, usable, _estimate_of(program, compared), _to_shrink(compared)
                )
    selection.check(plan.allocation)


def _sides(plan: Plan) -> Iterator[tuple[str, Pool, Footprint]]:
    """Yields name, pool and footprint of each side that is planned for."""
    for side, pool, made in (
        ("learner", plan.allocation.learner, plan.learner),
        ("sampler", plan.allocation.sampler, plan.sampler),
    ):
        if pool is not None and made is not None:
            yield side, pool, made.footprint


def _planner_of(pool: Pool) -> Planner:
    planner = find_plugin(pool.engine).planner()
    assert planner is not None  # or there would be no plan
    return planner


def side_by_side(checked: Sequence[Checked]) -> Iterator[str]:
    """Yields lines of a table: a program's peak on each topology, in brackets the estimate; GiB."""
    topologies = list(dict.fromkeys(each.topology for each in checked))
    cells = {(each.name, each.topology): _cell(each) for each in checked}
    names = list(dict.fromkeys(each.name for each in checked))
    width = max(map(len, names), default=0)
    yield f"{'GiB (estimated)':{width}}  " + "  ".join(f"{name:>20}" for name in topologies)
    for name in names:
        yield f"{name:{width}}  " + "  ".join(f"{cells.get((name, topology), '-'):>20}" for topology in topologies)


def _cell(checked: Checked) -> str:
    estimate = "" if checked.estimate is None else f" ({checked.estimate / GIB:.2f})"
    peak = "too large" if checked.program.peak is None else f"{checked.program.peak / GIB:.2f}"
    return f"{'' if checked.fits else '! '}{peak}{estimate}"


def _full(request: Request) -> Footprint:
    """Returns the learner's footprint for the batch that its programs are compiled for: one
    micro-batch, a row to an episode, of which every token is trained on.
    """
    config = changed(request, "gconfig.n_samples", 1)
    config = changed(dataclasses.replace(request, config=config), "train_dataset.batch_size", 1)
    completion = config.actor.mb_spec.max_tokens_per_row - 1
    learner = estimate(dataclasses.replace(request, config=config, prompt=1, completion=completion)).learner
    assert learner is not None  # whose programs these are
    return learner.footprint


def _estimate_of(program: Program, footprint: Footprint) -> float | None:
    """Returns the estimated peak of a program, or None."""
    sizes = [sum(footprint.moments[moment].values()) for moment in program.moments if moment in footprint.moments]
    return footprint.held + max(sizes) if sizes else None


def _to_shrink(footprint: Footprint) -> str:
    """Names the largest components of the estimate."""
    parts = list(footprint.components.items())[:LARGEST]
    return "largest by the estimate: " + ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts)
