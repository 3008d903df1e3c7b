"""Planned peaks agree with what was measured, and with what compilers say (docs/plan.md)."""

from pathlib import Path

import pytest

from rljax.batching.compaction import compact, kept
from rljax.chips import GIB
from rljax.experiments.bench.plan_cases import learners, samplers
from rljax.experiments.bench.several.planned import learner_gb
from rljax.hf.shapes import shape_of
from rljax.hf.tensors import parameter_count
from tests.unit.planning.plans import ONE_EPISODE, learner_of, plan_of

REPOSITORY = Path(__file__).resolve().parents[3]
ROW = {"actor.mb_spec.max_tokens_per_row": 16384, **ONE_EPISODE}
SMOL = {"actor.mb_spec.max_tokens_per_row": 2048, "gconfig.max_new_tokens": 38, **ONE_EPISODE}  # segments of 75
KEPT, FULL = {"actor.gradient_checkpointing": "none"}, {"actor.gradient_checkpointing": "full"}
H200, SMOLLM = {"topology": "h200:1"}, {"topology": "h200:1", "shape": "smollm2-135m", "prompt": 37, "completion": 38}
EIGHT = {"actor.mb_spec.rows_per_mb": 8, "train_dataset.batch_size": 20 * 27}  # so that a minibatch is several micro-batches
MEASURED = {  # docs/benchmarks.md: "A learner's step", GB
    "qwen3 jax": (37.6, "jax:d1", H200, ROW),
    "qwen3 jax, 2048 logits": (32.7, "jax:d1", H200, ROW | {"actor.logprob_chunk": 2048}),
    "qwen3 fsdp": (33.5, "fsdp:d1", H200, ROW | KEPT),
    "qwen3 fsdp, recomputed": (10.9, "fsdp:d1", H200, ROW | FULL | {"actor.logprob_chunk": 1024}),
    "smollm2 jax": (26.8, "jax:d1", SMOLLM, SMOL | {"actor.mb_spec.rows_per_mb": 20}),
    "smollm2 jax, 2048 logits": (25.5, "jax:d1", SMOLLM, SMOL | {"actor.mb_spec.rows_per_mb": 20, "actor.logprob_chunk": 2048}),
    "smollm2 fsdp": (26.0, "fsdp:d1", SMOLLM, SMOL | KEPT | {"actor.mb_spec.rows_per_mb": 20}),
    "smollm2 fsdp, 8 of 20 rows": (12.5, "fsdp:d1", SMOLLM, SMOL | KEPT | EIGHT),
    "smollm2 fsdp, 8 of 20 rows, recomputed": (4.0, "fsdp:d1", SMOLLM, SMOL | FULL | EIGHT),
}
EIGHT_ROWS = {  # docs/plan.md, GB of a step of eight rows of 16,384 tokens, one to a micro-batch, on H200s
    ("fsdp:d1", "qwen3-0.6b"): 14.22,
    ("fsdp:f2", "qwen3-0.6b"): 9.48,
    ("fsdp:c2", "qwen3-0.6b"): 9.54,
    ("fsdp:d1", "qwen3-1.7b"): 34.32,
    ("jax:d1", "qwen3-0.6b"): 40.56,
    ("jax:f2", "qwen3-0.6b"): 32.88,
    ("jax:d1", "qwen3-1.7b"): 40.53,
}
TRAINED_ALL = {"prompt": 1, **ONE_EPISODE}
COMPILED = {  # docs/plan.md, GB of the update: GB, shape, topology, allocation_mode, rows per micro-batch, tokens per row
    "v5e": (3.37, "qwen3-0.6b", "v5e:2x4", "jax:d2f2t2", 1, 4096),
    "v6e": (5.485, "qwen3-0.6b", "v6e:2x4", "jax:d2f2t2", 1, 4096),
    "v5p": (5.48, "qwen3-0.6b", "v5p:2x2x2", "jax:d2f2t2", 1, 4096),
    "smollm2": (2.990, "smollm2-135m", "v5e:2x4", "jax:f8", 1, 4096),
    "qwen3-8b": (11.024, "qwen3-8b", "v5e:4x4", "jax:f8t2", 1, 4096),
    "28 rows": (13.592, "qwen3-0.6b", "v5e:2x4", "jax:d2f2t2", 28, 4096),
    "92 rows": (13.718, "smollm2-135m", "v5e:2x2", "jax:f4", 92, 2048),
    "qwen2.5-0.5b": (12.119, "qwen2.5-0.5b", "v5e:2x4", "jax:f8", 12, 8192),
    "qwen2.5-1.5b": (11.846, "qwen2.5-1.5b", "v5e:2x4", "jax:f8", 10, 4096),
    "qwen3-1.7b": (12.561, "qwen3-1.7b", "v5e:2x4", "jax:f4t2", 12, 4096),
    "qwen3-8b, 3 rows": (14.100, "qwen3-8b", "v5e:4x4", "jax:f8t2", 3, 4096),
    "qwen3-14b": (78.683, "qwen3-14b", "v5p:2x2x2", "jax:f8", 4, 16384),
    "llama3.1-8b": (27.060, "llama3.1-8b", "v6e:2x4", "jax:f8", 5, 4096),
}
SLOPES = {  # docs/plan.md, GiB of the update of a row of 4,096 in chunks of 2,048 logits, recomputed
    ("qwen3-0.6b", "v6e:2x4"): 3.80,
    ("qwen3-1.7b", "v6e:2x4"): 6.14,
    ("qwen2.5-0.5b", "v6e:2x4"): 3.53,
    ("smollm2-135m", "v6e:2x4"): 1.13,
    ("smollm2-135m", "v5p:2x2x2"): 1.13,
    ("qwen3-0.6b", "v5e:2x4"): 3.29,
}


@pytest.mark.parametrize(("shape", "topology"), SLOPES)
def test_slopes_of_logits_count_on_a_tpu_where_its_compiler_keeps_them(shape, topology):
    keys = {"actor.logprob_chunk": 2048, "actor.mb_spec.max_tokens_per_row": 4096} | FULL
    peak = learner_of("jax:f8", shape=shape, topology=topology, completion=4095, **(TRAINED_ALL | keys)).peak
    assert peak == pytest.approx(GIB * SLOPES[shape, topology], rel=0.04)


@pytest.mark.parametrize("case", MEASURED)
def test_a_learner_is_within_a_twentieth_of_the_peak_that_was_measured(case):
    gigabytes, mode, place, keys = MEASURED[case]
    assert learner_of(mode, **place, **keys).peak == pytest.approx(1e9 * gigabytes, rel=0.05)


@pytest.mark.parametrize(("mode", "shape"), EIGHT_ROWS)
def test_a_learner_of_several_micro_batches_is_as_large_as_measured_on_one_gpu_and_on_two(mode, shape):
    planned, measured = learner_gb(mode, shape, "h200:2", 8, 16384, 16), EIGHT_ROWS[mode, shape]
    assert planned == pytest.approx(measured, rel=0.01 if mode.startswith("fsdp") else 0.05)
    page = (REPOSITORY / "docs/plan.md").read_text()
    assert f" | {planned:.2f} | {measured:.2f} | {100 * (planned / measured - 1):+.1f}% |" in page


@pytest.mark.parametrize("case", COMPILED)
def test_a_learner_is_within_a_tenth_of_the_peak_that_the_tpu_compiler_says(case):
    gigabytes, shape, topology, mode, rows, tokens = COMPILED[case]
    keys = {"actor.mb_spec.rows_per_mb": rows, "actor.mb_spec.max_tokens_per_row": tokens, "completion": tokens - 1}
    keys |= {"actor.logprob_chunk": 2048} if rows == 1 else {}
    footprint = learner_of(mode, shape=shape, topology=topology, **(TRAINED_ALL | keys))
    assert footprint.peak == pytest.approx(1e9 * gigabytes, rel=0.1)


@pytest.mark.parametrize("shape", ["smollm2-135m", "qwen3-0.6b", "qwen3-1.7b"])
def test_a_learner_is_planned_for_the_positions_that_the_measured_batch_scores(shape):
    """A row of 1,026 trained tokens takes the next eighth of 2,048, as a plan of trajectories of 37 and 38 tokens has it."""
    for case in learners(shape):
        batch = case.rows.batch(shape_of(shape).vocab_size)
        scored = compact(batch, kept(batch)).tokens.mask.size
        hidden = 2 * 2 * shape_of(shape).hidden_size  # bfloat16, and their gradient
        hidden += 8 * shape_of(shape).hidden_size if case.mode.startswith("fsdp") else 0  # torch's index of each element
        assert case.plan("h200:1").learner.footprint.moments["loss"]["hidden states that are scored"] == hidden * scored


def test_the_page_has_the_plans_of_what_was_measured_on_a_gpu_within_a_tenth():
    cases = [case for shape in ("smollm2-135m", "qwen3-0.6b", "qwen3-1.7b") for case in learners(shape)]
    for shape in ("qwen3-0.6b", "qwen3-1.7b"):
        after = max(i for i, case in enumerate(cases) if case.shape == shape)
        cases[after + 1 : after + 1] = samplers(shape, sglang=False)
    page = (REPOSITORY / "docs/plan.md").read_text()
    rows = page.partition("| on one H200 | planned | measured | |\n")[2].partition("\n\n")[0].splitlines()[1:]
    for case, row in zip(cases, rows, strict=True):
        name, planned, measured, off = (cell.strip() for cell in row.strip("|").split("|"))
        assert case.what.split()[-1] in name.replace("`", ""), (case.what, name)
        assert float(planned) == pytest.approx(case.planned("h200:1") / 1e9, abs=0.005), name
        assert float(off.rstrip("%")) == pytest.approx(100 * (float(planned) / float(measured) - 1), abs=0.15), name
        assert float(planned) == pytest.approx(float(measured), rel=0.1), name


@pytest.mark.parametrize(("topology", "compiled"), [("v5e:2x4", 5.65), ("h100:8", 6.44)])
def test_a_slope_in_float32_takes_the_place_of_its_logits(topology, compiled):
    """GiB as the compilers have them, of algorithms/grpo with Qwen3-0.6B (docs/plan.md)."""
    keys = {"actor.dtype": "float32", "actor.mb_spec.max_tokens_per_row": 64, "actor.mb_spec.rows_per_mb": 24}
    keys |= {"gconfig.max_new_tokens": 4, "actor.kl_ctl": 0.001, **ONE_EPISODE}
    footprint = learner_of("jax:f8", topology=topology, prompt=1, completion=63, **keys)
    loss = footprint.moments["loss"]
    assert loss["logits"] == 4 * 24 * 64 * shape_of("qwen3-0.6b").vocab_size
    assert footprint.held + sum(loss.values()) == pytest.approx(GIB * compiled, rel=0.06)


def test_a_sampler_is_as_large_as_measured():
    keys = {"jax.slots": 256, "jax.context_length": 2048, "jax.prefill_chunk": 2048}
    footprint = plan_of("jax:d1+jax:d1", topology="h200:2", **keys).sampler.footprint
    assert footprint.resident["KV cache"] == pytest.approx(60.1e9, rel=0.01)
    decoding = footprint.held + sum(footprint.moments["decoding"].values())
    assert decoding == pytest.approx(62.2e9, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "dtype", "slots", "context", "compiled"),
    [
        ("qwen3-0.6b", "float32", 256, 64, 5.28),
        ("qwen3-0.6b", "bfloat16", 64, 2048, 3.64),
        ("qwen3-8b", "bfloat16", 64, 2048, 37.57),
    ],
)
def test_on_a_gpu_a_sampler_that_is_split_by_fsdp_gathers_its_weights_ahead(shape, dtype, slots, context, compiled):
    """GiB of the decode step over 8 as XLA's compiler has it, with jax 0.11.2 (docs/plan.md)."""
    keys = {"jax.sampler_dtype": dtype, "jax.cache_dtype": dtype, "jax.slots": slots, "jax.context_length": context}
    keys["gconfig.max_new_tokens"] = 4
    footprint = plan_of("jax:f8", shape=shape, **keys).sampler.footprint
    decoding = footprint.moments["decoding"]
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert decoding["weights gathered for use"] == 2 * size * parameter_count(shape_of(shape))
    assert footprint.held + sum(decoding.values()) == pytest.approx(GIB * compiled, rel=0.15)


DECODE = {  # docs/plan.md, GiB of the decode step: GiB, shape, topology, allocation_mode
    "qwen3-32b v5p": (13.87, "qwen3-32b", "v5p:2x2x2", "jax:f8"),
    "qwen3-32b v6e": (7.30, "qwen3-32b", "v6e:4x4", "jax:f8t2"),
    "qwen3-8b v5e": (5.53, "qwen3-8b", "v5e:2x4", "jax:f8"),
}


@pytest.mark.parametrize("case", DECODE)
def test_a_sampler_is_within_a_tenth_of_the_peak_that_the_tpu_compiler_says(case):
    size, shape, topology, mode = DECODE[case]
    footprint = plan_of(mode, shape=shape, topology=topology).sampler.footprint
    assert footprint.held + sum(footprint.moments["decoding"].values()) == pytest.approx(GIB * size, rel=0.1)
