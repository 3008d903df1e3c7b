"""Log-prob, entropy and decoupled loss, forward and backward: time, memory, errors.

python -m experiments.bench.logprobs        # on a GPU: M 8192, H 4096, V 151936, bfloat16
python -m experiments.bench.logprobs --rows=64 --hidden=32 --vocabulary=512 --chunk=16

Times are medians over repeats: of CUDA events in torch, of the wall timer around a finished call
in JAX. Memory is the peak over what inputs and gradients take (torch), or the compiled program's
temporaries (JAX). Errors are against float64 numpy on the first rows (--check_rows), cut into as
many chunks as the whole: log-prob max abs, gradients relative norm.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from absl import flags

from rljax.experiments import main
from rljax.experiments.bench.logprobs_case import Case, Outcome, Variant
from rljax.objective import logprobs, oracle
from rljax.objective.spec import Objective, TokenArrays

BACKEND = flags.DEFINE_enum("backend", "all", ["all", "torch", "jax"], "Which backends to run.")
ROWS = flags.DEFINE_integer("rows", 8192, "M, trained tokens.")
HIDDEN = flags.DEFINE_integer("hidden", 4096, "H, hidden size.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 151936, "V, vocabulary.")
CHUNK = flags.DEFINE_integer("chunk", 1024, "Rows of logits in memory at once in the ops of rljax.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Dtype of hidden and unembedding.")
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Sampling temperature.")
SOFTCAP = flags.DEFINE_float("softcap", None, "Final logit soft-cap; none by default.")
ENTROPY_COEF = flags.DEFINE_float("entropy_coef", 0.01, "Weight of the entropy bonus, so that its gradient is computed too.")
REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls, after three untimed ones.")
CHECK_ROWS = flags.DEFINE_integer("check_rows", 256, "Rows checked against float64; 0 checks nothing.")
ONLY = flags.DEFINE_list("only", [], "Names of variants to run, by substring; all by default.")
JSON = flags.DEFINE_string("json", "", "File for the rows of the table; empty: none.")

TENSOR_FLOPS = 760e12  # bfloat16 matmuls of an H100 as measured, not as advertised


def make_case() -> Case:
    random = np.random.default_rng(0)
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[DTYPE.value]
    rows, shape = ROWS.value, (1, ROWS.value)
    hidden = random.standard_normal((rows, HIDDEN.value), np.float32).astype(dtype)
    # Logits of standard deviation 2: a distribution as peaked as a language model's
    unembedding = (random.standard_normal((VOCABULARY.value, HIDDEN.value), np.float32) * (2 / HIDDEN.value**0.5)).astype(dtype)
    labels = random.integers(0, VOCABULARY.value, rows).astype(np.int32)

    def normal(mean: float, std: float) -> np.ndarray:
        return random.normal(mean, std, shape).astype(np.float32)

    proximal = normal(-np.log(VOCABULARY.value) - 2, 2)
    tokens = TokenArrays(
        loss_weight=np.full(shape, 1 / rows, np.float32),
        mask=np.ones(shape, bool),
        advantage=normal(0, 1),
        behavior_logp=proximal + normal(0, 0.3),
        segment_ids=np.ones(shape, np.int32),
        proximal_logp=proximal,
    )
    objective = Objective(clip_high=0.28, dual_clip=3.0, weight_cap=5.0, entropy_coef=ENTROPY_COEF.value)
    return Case(hidden, unembedding, labels, tokens, objective, TEMPERATURE.value, SOFTCAP.value, CHUNK.value)


def exact_outcome(case: Case) -> Outcome:
    """Computes the outcome in float64, from the rounded inputs."""
    static: dict[str, Any] = dict(temperature=case.temperature, softcap=case.softcap)
    hidden, unembedding = case.hidden.astype(np.float64), case.unembedding.astype(np.float64)
    logp, entropy = logprobs.token_logprobs(hidden, unembedding, case.labels, **static)
    result = oracle.policy_objective(logp[None], entropy[None], case.tokens, case.objective)
    grads = logprobs.token_logprobs_grad(hidden, unembedding, case.labels, result.d_logp[0], result.d_entropy[0], **static)
    return Outcome(logp, *grads)


def errors(outcome: Outcome, exact: Outcome) -> dict[str, float | None]:
    """Returns the largest log-prob error (nats) and the relative norms of both gradients' errors."""

    def relative(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return {
        "logp_error": None if outcome.logp is None else float(np.abs(outcome.logp - exact.logp).max()),
        "d_hidden_error": relative(outcome.d_hidden, exact.d_hidden),
        "d_unembedding_error": relative(outcome.d_unembedding, exact.d_unembedding),
    }


def run(variant: Variant, case: Case, small: Case | None, exact: Outcome | None) -> dict[str, Any]:
    """Returns one row of the table; a variant that fails (out of memory, say) has the error there."""
    row: dict[str, Any] = {"variant": variant.name}
    try:
        if small is not None and exact is not None and variant.exact:
            row |= errors(variant.check(small), exact)
        seconds, workspace = variant.measure(case, REPEATS.value)
    except (RuntimeError, TypeError, ValueError, ImportError) as error:
        return row | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    return row | {"ms": seconds * 1e3, "workspace_mb": None if workspace is None else workspace / 1e6}


COLUMNS: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("variant", "variant", str),
    ("ms", "ms", "{:.2f}".format),
    ("workspace_mb", "MB beside", "{:.0f}".format),
    ("logp_error", "logp max abs", "{:.1e}".format),
    ("d_hidden_error", "d_hidden rel", "{:.1e}".format),
    ("d_unembedding_error", "d_unemb rel", "{:.1e}".format),
    ("failed", "failed", str),
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        values = [(row.get(key), text) for key, _, text in COLUMNS]
        return ["-" if value is None else text(value) for value, text in values]

    lines = [[title for _, title, _ in COLUMNS], *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def bench() -> None:
    case = make_case()
    small = case.head(min(CHECK_ROWS.value, ROWS.value)) if CHECK_ROWS.value else None
    exact = exact_outcome(small) if small is not None else None
    rows = []
    for backend in ("torch", "jax") if BACKEND.value == "all" else (BACKEND.value,):
        module = importlib.import_module(f"rljax.experiments.bench.logprobs_{backend}")
        print(f"{module.device()}: M {ROWS.value}, H {HIDDEN.value}, V {VOCABULARY.value}, {DTYPE.value}, chunk {CHUNK.value}")
        for variant in module.variants():
            if not ONLY.value or any(word in variant.name for word in ONLY.value):
                rows.append(run(variant, case, small, exact))
                print(table(rows[-1:]).splitlines()[1], flush=True)
    floor = 6.0 * ROWS.value * HIDDEN.value * VOCABULARY.value / TENSOR_FLOPS
    print(f"\n6MHV at {TENSOR_FLOPS / 1e12:.0f} TFLOP/s: {floor * 1e3:.1f} ms")
    print(table(rows))
    if JSON.value:
        with open(JSON.value, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main.run_main(bench)
