"""The programs of a plan, compiled for TPUs, beside its estimate."""

import importlib.util

import pytest

from rljax.chips import Topology
from rljax.config import io
from rljax.engine import find_plugin
from rljax.errors import UserError
from rljax.experiments.plan_compile import compile_plan
from rljax.hf.shapes import shape_of
from rljax.planning.estimate import Request, plan

SMALL = [
    ("actor.mb_spec.max_tokens_per_row", "256"),
    ("gconfig.max_new_tokens", "64"),
    ("jax.slots", "8"),
    ("jax.context_length", "256"),
    ("jax.prefill_chunk", "32"),
]


def plan_of(mode, topology, shape="tiny", extra=()):
    config = io.load("base", [("allocation_mode", mode), *SMALL, *extra])
    return plan(Request(config, shape_of(shape), Topology.parse(topology), find_plugin, 64, 64))


def test_programs_for_gpus_are_refused():
    with pytest.raises(UserError, match=r"^--compile: h100:1 has no TPUs"):
        next(compile_plan(plan_of("jax:d1", "h100:1")))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="left out: libtpu is not installed (pip install 'rljax[tpu]')"
)
def test_every_program_of_both_sides_fits_and_has_its_kernel():
    programs = {f"{p.side} {p.name}": p for p in compile_plan(plan_of("jax:d2+jax:f2", "v5e:2x2"))}
    assert {"learner score", "learner update", "sampler decode", "sampler copy"} <= programs.keys()
    assert all(program.fits and program.seconds > 0 for program in programs.values())
    assert {name for name, program in programs.items() if program.estimate is not None} == {"learner update", "sampler decode"}
    assert any(name.startswith("splash") for name in programs["learner update"].kernels)
    assert "ragged_paged_attention_kernel" in programs["sampler decode"].kernels
