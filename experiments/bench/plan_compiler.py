"""The plan's estimate beside the compiler's peak: configs near a chip's limit, in a table.

    python -m experiments.bench.plan_compiler
    python -m experiments.bench.plan_compiler --case='qwen3-8b.*'

Compiles the update of ten learners whose estimate is within a fifth of what their chip offers, half
of them above it, for TPUs that are not there (the extra [tpu]; no weights). GB of 1e9 bytes per
device; of a program that does not fit, those that the compiler's message says it would need. Exit
status 1 if a verdict of the estimate is not the compiler's, or the estimate is more than a tenth
off its figure.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from absl import flags

from rljax.chips import Topology
from rljax.config import io
from rljax.engine import find_plugin
from rljax.experiments import main
from rljax.experiments.bench.shapes import write_config
from rljax.hf.shapes import shape_of
from rljax.planning.estimate import Plan, Request, plan

CASE = flags.DEFINE_string("case", "", "Regular expression; cases whose lines don't begin with it are left out.")
NEAR = 0.1  # of the compiler's figure


class Case(NamedTuple):
    """A learner; every token of its rows is trained on."""

    shape: str
    topology: str
    mode: str  # allocation_mode
    tokens: int  # per row
    rows: int  # per micro-batch

    def __str__(self) -> str:
        return f"{self.shape} {self.topology} {self.mode}, {self.rows} x {self.tokens:,}"


CASES = (
    Case("qwen3-0.6b", "v5e:2x4", "jax:d2f2t2", 4096, 34),
    Case("qwen2.5-1.5b", "v5e:2x4", "jax:f8", 4096, 16),
    Case("qwen3-4b", "v5e:4x4", "jax:f16", 4096, 7),
    Case("qwen3-8b", "v5e:4x4", "jax:f8t2", 4096, 4),
    Case("llama3.1-8b", "v6e:2x4", "jax:f8", 4096, 7),
    Case("qwen3-0.6b", "v5e:2x4", "jax:d2f2t2", 4096, 42),
    Case("qwen3-1.7b", "v5e:2x4", "jax:f4t2", 4096, 20),
    Case("qwen3-8b", "v5e:4x4", "jax:f8t2", 4096, 6),
    Case("qwen3-8b", "v6e:2x2", "jax:f4", 4096, 1),
    Case("qwen3-32b", "v6e:4x4", "jax:f8t2", 4096, 1),
)


def plan_of(case: Case) -> Plan:
    """Plans the learner of a case."""
    keys = {
        "allocation_mode": case.mode,
        "rollout.addr": "host:1",  # the sampler is elsewhere
        "train_dataset.batch_size": 1,
        "gconfig.n_samples": 1,
        "actor.mb_spec.max_tokens_per_row": case.tokens,
        "actor.mb_spec.rows_per_mb": case.rows,
    }
    config = io.load("base", [(key, str(value)) for key, value in keys.items()])
    return plan(Request(config, shape_of(case.shape), Topology.parse(case.topology), find_plugin, 1, case.tokens - 1))


def bench() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # libtpu compiles only; without a TPU JAX would look for one
    jax.config.update("jax_enable_compilation_cache", False)  # what is compiled for a TPU can't be read back without one
    wrong = 0
    for case in CASES:
        if re.match(CASE.value, str(case)):
            wrong += not compared(case)
    sys.exit(int(wrong > 0))


def compared(case: Case) -> bool:
    """Prints a case's line of JSON. Returns whether estimate and compiler agree."""
    from rljax.engines.jax.planning.compile_only import MOMENTS
    from rljax.engines.jax.planning.hlo import needed
    from rljax.engines.jax.planning.topology import QUICK, OutOfMemory, compile_target, learner_targets, topology_devices

    made = plan_of(case)
    (group,), pool = made.groups, made.allocation.learner
    assert pool is not None
    moments = [sum(group.footprint.moments[moment].values()) for moment in MOMENTS["learner", "update"]]
    estimate, peak, fits, problem, seconds = group.footprint.held + max(moments), None, False, "", 0.0
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), case.shape)
        targets = learner_targets(made.request.config, pool, Path(directory), topology_devices(case.topology))
        target = next(target for target in targets if target.name == "update")
        try:
            compiled = compile_target(target, QUICK)
            peak, seconds = float(compiled.peak), compiled.seconds
            fits = peak <= group.usable
        except OutOfMemory as error:
            problem = str(error)
            peak = needed(problem)
    off = None if peak is None else estimate / peak - 1
    line = {
        "case": str(case),
        "usable_gb": round(group.usable / 1e9, 2),
        "estimated_gb": round(estimate / 1e9, 2),
        "compiler_gb": None if peak is None else round(peak / 1e9, 2),
        "off": None if off is None else round(off, 3),
        "estimate_fits": estimate <= group.usable,
        "compiler_fits": fits,
        "compile_s": round(seconds, 1),
        "problem": problem,
    }
    print(json.dumps(line), flush=True)
    return (estimate <= group.usable) == fits and (off is None or abs(off) <= NEAR)


if __name__ == "__main__":
    main.run_main(bench)
