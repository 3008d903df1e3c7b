"""Says whether a config fits devices before they are rented, where the memory goes, and how fast.

    python -m experiments.plan --config=configs/quickstart.py --topology=v5e:2x4 --topology=h100:8
    python -m experiments.plan --config=base --shape=qwen3-8b --topology=h100:8 \
        --config.allocation_mode='sglang:d4+fsdp:f4'

An estimate by arithmetic (docs/plan.md), which needs neither jax nor torch, nor weights: of the
model config.json is read, or with --shape nothing. Exit status 0: fits every topology; 2: does not
fit one; 1: bad input. --json prints the plans as JSON. --compile also compiles the programs of the
JAX path for each topology, which takes minutes and the extra [tpu] or [cuda], and runs the FSDP2
learner's update on tensors without data; of several topologies it prints them side by side.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from rljax.errors import UserError
from rljax.experiments import main

if TYPE_CHECKING:
    from rljax.config.schema import Config
    from rljax.experiments.plan_compile import Checked
    from rljax.hf.spec import ModelSpec
    from rljax.planning.estimate import Plan
    from rljax.planning.text import Report

main.define_config_flags(workdir=False)
TOPOLOGY = flags.DEFINE_multi_string("topology", [], "Devices to plan for, as v5e:2x4 or h100:8; may be given several times.")
SHAPE = flags.DEFINE_string("shape", "", "A published model by its name, such as qwen3-8b. Empty: the config's model.")
PROMPT = flags.DEFINE_integer("prompt_tokens", None, "Tokens of an average prompt; none: assumed.", lower_bound=1)
COMPLETION = flags.DEFINE_integer("completion_tokens", None, "Tokens of an average completion; none: assumed.", lower_bound=1)
COMPILE = flags.DEFINE_bool("compile", False, "Compile the programs for the topologies too.")
PROGRAMS = flags.DEFINE_string("programs", "", "Regular expression; with --compile other programs are left out. Empty: all.")
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of text.")
DOES_NOT_FIT = 2  # exit status


def plan() -> None:
    from rljax import engine
    from rljax.config import checks
    from rljax.experiments.plan_lengths import check_lengths
    from rljax.launching.hosts import shared_over_hosts

    if PROGRAMS.value and not COMPILE.value:
        raise UserError(f"--programs: {PROGRAMS.value!r} chooses among the programs that --compile compiles, which is missing")
    config = planned_config()
    checks.check(config)
    pools = engine.allocate(config)
    engine.require_both(pools)
    check_lengths(config, pools, PROMPT.value, COMPLETION.value)
    if not TOPOLOGY.value:
        raise UserError("--topology: missing (devices to plan for, such as v5e:2x4 or h100:8)")
    spec = model_of(config)
    reports = [_without_shared(report_of(config, spec, name)) for name in TOPOLOGY.value]
    _require_compilers(reports)
    fits, shown, compiled, failed = True, [], [], list[UserError]()
    for report in reports:
        _say(report)
        warnings = list(filter(None, [shared_over_hosts(report.plan.allocation, report.plan.request.topology)]))
        for line in warnings:
            _say(f"warning: {line}")
        programs = []
        for program in _compiled(report, failed):
            programs.append(program)
            _say(program)
        fits = fits and report.plan.fits and all(program.fits for program in programs)
        compiled += programs
        shown.append(report.json() | {"warnings": warnings})
        if COMPILE.value:
            shown[-1]["programs"] = [program.json() for program in programs]
    if JSON.value:
        print(json.dumps(shown))
    elif COMPILE.value and len(reports) > 1:
        from rljax.experiments.plan_compile import side_by_side

        print(*side_by_side(compiled), sep="\n")
    if failed:
        raise failed[0]
    if not fits:
        sys.exit(DOES_NOT_FIT)


def planned_config() -> Config:
    """Returns the config of the flags; it needs no data, and with --shape no model.

    Raises UserError.
    """
    config = main.config_from_flags()
    data = dataclasses.replace(config.train_dataset, path=config.train_dataset.path or "none")  # is not read
    actor = dataclasses.replace(config.actor, path=SHAPE.value, init_from_scratch=False) if SHAPE.value else config.actor
    return dataclasses.replace(config, train_dataset=data, actor=actor)


def _without_shared(report: Report) -> Report:
    """Leaves out changes to pools that share devices of several hosts, unless the plan's do."""
    from rljax.launching.hosts import shared_over_hosts

    def shared(plan: Plan) -> str:
        return shared_over_hosts(plan.allocation, plan.request.topology)

    if shared(report.plan):
        return report
    return dataclasses.replace(report, changes=[change for change in report.changes if not shared(change.plan)])


def _say(what: object) -> None:
    if not JSON.value:
        print(what, flush=True)


def _require_compilers(reports: Sequence[Report]) -> None:
    """Checks, with --compile, what compiling needs, before minutes are spent. Raises UserError."""
    if COMPILE.value:
        from rljax.experiments.plan_compile import Selection, require_compilers

        Selection(PROGRAMS.value)
        require_compilers(report.plan for report in reports)


def _compiled(report: Report, failed: list[UserError]) -> Iterator[Checked]:
    """Compiles the programs of a plan with --compile. What ends it is added to `failed`."""
    if COMPILE.value:
        from rljax.experiments.plan_compile import compile_plan

        try:
            yield from compile_plan(report.plan, PROGRAMS.value)
        except UserError as error:  # other topologies are still compiled for, and what was compiled is shown
            failed.append(error)


def report_of(config: Config, spec: ModelSpec, topology: str) -> Report:
    """Plans a config for a topology. Raises UserError."""
    from rljax.chips import Topology
    from rljax.engine import find_plugin
    from rljax.hf.spec import ModelSpec
    from rljax.launching.hosts import check_slice, host_of
    from rljax.planning.estimate import Request
    from rljax.planning.estimate import plan as estimate
    from rljax.planning.text import Report

    where = Topology.parse(topology)
    check_slice(where)
    teacher = ModelSpec.from_directory(config.actor.distill.teacher) if config.actor.distill.teacher else None
    made = estimate(Request(config, spec, where, find_plugin, PROMPT.value, COMPLETION.value, teacher))
    return Report.of(made, host_of(where))


def model_of(config: Config) -> ModelSpec:
    """Returns the shape of --shape or of the config's model. Raises UserError."""
    from rljax.config.registry import nearest
    from rljax.hf.init import spec_of
    from rljax.hf.shapes import SHAPES, shape_of
    from rljax.hf.tokenizer import vocabulary_of
    from rljax.planning.model_shape import shape_in

    if SHAPE.value:
        if SHAPE.value not in SHAPES:
            raise UserError(f"--shape: no model named {SHAPE.value!r} ({nearest(SHAPE.value, list(SHAPES))})")
        return shape_of(SHAPE.value)
    if config.actor.init_from_scratch:
        return spec_of(config.actor.init, vocabulary_of(config.actor.init.tokenizer))
    if not Path(config.actor.path).is_dir():
        raise UserError(f"actor.path: no directory {config.actor.path!r} (or --shape=NAME: {', '.join(SHAPES)})")
    return shape_in(config.actor.path)


if __name__ == "__main__":
    main.run_main(plan)
