"""The programs of a plan, compiled for TPUs and GPUs or run without data, beside its estimate."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.chips import Topology
from rljax.config import io
from rljax.engine import find_plugin
from rljax.engines.jax.planning.hlo import needed
from rljax.errors import UserError
from rljax.experiments.plan_compile import Selection, compile_plan, require_compilers, side_by_side
from rljax.hf.shapes import shape_of
from rljax.planning.changes import changes
from rljax.planning.estimate import Request, plan

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL = [
    ("actor.mb_spec.max_tokens_per_row", "256"),
    ("gconfig.max_new_tokens", "64"),
    ("jax.slots", "8"),
    ("jax.context_length", "256"),
    ("jax.prefill_chunk", "32"),
]


def plan_of(mode, topology, shape="tiny", extra=()):
    config = io.load(
        "base", [("actor.path", shape), ("train_dataset.path", "task:add"), ("allocation_mode", mode), *SMALL, *extra]
    )
    return plan(Request(config, shape_of(shape), Topology.parse(topology), find_plugin, 64, 64))


HAS_CUDA = any(point.name.startswith("xla_cuda") for point in importlib.metadata.entry_points(group="jax_plugins"))
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="left out: libtpu is not installed (pip install 'rljax[tpu]')"
)
needs_cuda = pytest.mark.skipif(
    not HAS_CUDA, reason="left out: jax has no CUDA plugin, which compiles without a GPU (pip install 'rljax[cuda]')"
)


@pytest.mark.skipif(HAS_CUDA, reason="left out: the plugin is there")
def test_without_the_cuda_plugin_the_extra_is_named():
    with pytest.raises(UserError, match=r"^--topology: h100:1 needs the CUDA plugin of jax, not a GPU .*rljax\[cuda\]"):
        next(compile_plan(plan_of("jax:d1", "h100:1")))


def test_a_plan_of_servers_alone_has_nothing_to_compile():
    with pytest.raises(UserError, match=r"^--compile: the engines of sglang:d1 have no programs"):
        next(compile_plan(plan_of("sglang:d1", "h100:1")))


@pytest.mark.skipif(HAS_CUDA, reason="left out: the plugin is there")
def test_compilers_of_all_plans_are_looked_for_and_servers_need_none():
    require_compilers([plan_of("sglang:d1", "h100:1")])
    with pytest.raises(UserError, match=r"^--topology: h100:2 needs the CUDA plugin"):
        require_compilers([plan_of("sglang:d1", "h100:1"), plan_of("sglang:d1+jax:d1", "h100:2")])


def command(*arguments):
    line = [sys.executable, "-m", "experiments.plan", "--config=base", "--shape=tiny", "--compile", "--json", *arguments]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason="left out: the plugin is there")
def test_without_a_compiler_nothing_is_compiled():
    """No program of h200, which is named first, is compiled before the missing compiler of the other is said."""
    done = command("--config.allocation_mode=jax:d1+fsdp:d1", "--topology=h200:2", "--topology=h100:2")
    assert (done.returncode, done.stdout) == (1, "") and "rljax[cuda]" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_ends_a_compilation_leaves_the_plans_of_all_topologies():
    topologies = ["h100:2", "h200:2"]
    arguments = [f"--topology={name}" for name in topologies]
    done = command("--config.allocation_mode=sglang:d1+fsdp:d1", "--programs=score", *arguments)
    assert done.returncode == 1 and re.search(r"--programs: 'score' matches no .*one of update\)\n$", done.stderr)
    assert [(each["topology"], each["programs"]) for each in json.loads(done.stdout)] == [(name, []) for name in topologies]


@pytest.mark.parametrize(
    ("only", "line"),
    [
        ("(", r"--programs: '\(' is no regular expression: missing \), unterminated subpattern"),
        ("zzz", r"--programs: 'zzz' matches no program of fsdp:d1 \(one of update, decode\)"),
        ("updat", r"--programs: 'updat' matches no program of fsdp:d1"),
    ],
)
def test_a_choice_of_no_programs_names_those_that_there_are(only, line):
    with pytest.raises(UserError, match=f"^{line}"):
        _choose(only)
    for some in ("update|zzz", "upd.*", ""):
        _choose(some)


def _choose(only):
    selection = Selection(only)
    chosen = [name for name in ("update", "decode") if selection(name)]
    selection.check("fsdp:d1")
    assert "update" in chosen


@pytest.mark.slow
@needs_libtpu
def test_every_program_of_both_sides_fits_and_has_its_kernel():
    programs = {checked.name: checked for checked in compile_plan(plan_of("jax:d2+jax:f2", "v5e:2x2"))}
    assert {"learner score", "learner update", "sampler decode", "sampler copy"} <= programs.keys()
    assert all(program.fits and program.program.seconds > 0 for program in programs.values())
    assert {name for name, program in programs.items() if program.estimate is not None} == {"learner update", "sampler decode"}
    assert any(name.startswith("splash") for name in programs["learner update"].program.kernels)
    assert "ragged_paged_attention_kernel" in programs["sampler decode"].program.kernels


@pytest.mark.slow
@needs_cuda
def test_programs_compile_for_a_gpu_that_is_not_there():
    checked = list(compile_plan(plan_of("jax:f2|jax:d2", "h100:2")))
    programs = {each.name: each.program for each in checked}
    assert all(each.fits for each in checked)
    assert "paged_attention" in programs["sampler decode"].kernels
    assert "all-gather" in programs["learner update"].collectives
    header, *lines = side_by_side(checked)
    assert header.split()[-1] == "h100:2" and [line.split("  ")[0] for line in lines] == list(programs)


TIGHT = {"shape": "qwen3-0.6b", "topology": "v5e:2x2"}
ROWS = [("actor.mb_spec.max_tokens_per_row", "4096"), ("actor.mb_spec.rows_per_mb", "48"), ("rollout.addr", "host:1")]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # two updates of Qwen3-0.6B: 100 s of CPU time
@needs_libtpu
def test_a_change_that_a_plan_suggests_makes_its_program_fit():
    before = plan_of("jax:f4", **TIGHT, extra=ROWS)
    assert not before.fits
    (refused,) = compile_plan(before, "update")
    assert not refused.fits
    assert needed(refused.program.problem) == pytest.approx(refused.estimate, rel=0.1)  # the refusal of the libtpu that is here
    change = next(change for change in changes(before) if change.plan.fits and change.key == "actor.mb_spec.rows_per_mb")
    assert [checked.fits for checked in compile_plan(change.plan, "update")] == [True]
