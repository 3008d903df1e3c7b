"""The parity certificate of a config: its model and its objective, JAX path beside torch path.

    python -m experiments.parity --config=configs/quickstart.py
    python -m experiments.parity --config=configs/smollm2_gsm8k.py --dtype=float64

Both paths load the same model directory and get the same random tokens, advantages and stale
log-probs. Compared are log-probs, entropies, the loss of the config's objective, the gradient of
every tensor by its Hugging Face name, the change of every tensor in one step of the config's
optimizer, and the optimizers alone: two steps in float64 on gradients of the same bits. Each has a
bound, by dtype. --json=FILE writes all of it. Exit status 0 if all hold, else 1. Needs the extra
[torch].
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from absl import flags

from rljax.batching.compaction import compact, kept
from rljax.config.schema import Config
from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.parity_case import Case, Result
from rljax.objective.spec import Objective

main.define_config_flags(workdir=False)
DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float64", "float32", "bfloat16"], "Dtype of parameters and arithmetic, on both paths."
)
ROWS = flags.DEFINE_integer("rows", 4, "Sequences.", lower_bound=1)
JSON = flags.DEFINE_string("json", None, "File for the whole report, with all tensors.")
LENGTH = flags.DEFINE_integer("length", 64, "Tokens per sequence; the first quarter is the prompt.", lower_bound=4)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Differences allowed between two right implementations."""

    logp: float  # nats, largest absolute difference
    loss: float  # relative
    gradient: float  # norm of the difference over the norm, of each tensor
    step: float  # the same, for the change in one optimizer step


# A first step of Adam is the gradient's sign: an entry near 0 may round to either sign, and its step then differs in full.
# In float64 the difference comes from norms and rotations, which both models compute in float32 whatever the dtype.
# In bfloat16 every layer rounds in its own order: each path alone is about 2% from the float32 gradient of a four-layer model.
BOUNDS = {
    "float64": Bounds(1e-5, 1e-6, 1e-5, 1e-2),
    "float32": Bounds(1e-3, 1e-4, 1e-3, 0.1),
    "bfloat16": Bounds(0.25, 0.05, 0.1, 0.5),
}
# For the optimizers alone: optax corrects the moments' bias in float32, whatever their dtype.
OPTIMIZER_BOUND = 1e-6


def parity() -> None:
    from rljax.config import checks as config_checks
    from rljax.config import io as config_io
    from rljax.hf.model_directory import prepare_model_directory

    config = main.config_from_flags()
    config_checks.check(config)
    if JSON.value:
        main.check_writable(Path(JSON.value))
    config = config_io.resolve(config)
    try:
        from rljax.experiments import parity_torch
    except ImportError as error:
        raise UserError(f"{error.name}: not installed (pip install 'rljax[torch]>=0.1')") from error
    from rljax.experiments import parity_jax

    with tempfile.TemporaryDirectory() as scratch:
        model_dir = prepare_model_directory(config.actor, Path(scratch) / "init", seed=config.seed)
        case = make_case(config, model_dir, DTYPE.value, ROWS.value, LENGTH.value)
        case = with_policies_near(case, parity_jax.run(case)["logp"])
        report = compare(case, Result(**parity_jax.run(case)), Result(**parity_torch.run(case)))
        report = report.with_optimizers(parity_jax.two_steps(case), parity_torch.two_steps(case))
    print("\n".join(report.lines()))
    if JSON.value:
        report.write(Path(JSON.value))
    sys.exit(0 if report.holds else 1)


def make_case(config: Config, model_dir: Path, dtype: str, rows: int, length: int) -> Case:
    """Draws random tokens and advantages; log-probs of the other policies are still uniform."""
    from rljax.batching.batch import Batch
    from rljax.hf.spec import ModelSpec
    from rljax.objective.aggregation import loss_weights

    objective = Objective.from_config(config)
    vocabulary = ModelSpec.from_directory(model_dir).vocab_size
    random = np.random.default_rng(config.seed)
    shape = (rows, length)
    loss_mask = np.broadcast_to(np.arange(length) >= length // 4, shape).copy()
    weights = loss_weights(list(loss_mask), config.actor.loss_aggregation, config.aggregation_constant)

    uniform = np.full(shape, -np.log(vocabulary), np.float32)
    batch = Batch(
        token_ids=random.integers(0, vocabulary, shape).astype(np.int32),
        segment_ids=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape),
        loss_mask=loss_mask,
        loss_weight=np.stack(weights),
        behavior_logp=uniform,
        versions=np.zeros(shape, np.int32),
        advantage=np.broadcast_to(random.normal(size=(rows, 1)), shape).astype(np.float32),
        proximal_logp=uniform,
        reference_logp=uniform,
    )
    return Case(config, model_dir, objective, batch.token_ids, compact(batch, kept(batch)), dtype)


def with_policies_near(case: Case, logp: np.ndarray) -> Case:
    """Draws proximal, behavior and reference log-probs around the model's own.

    Ratios are well inside the clip or well outside: a token that rounding carries over its edge
    would be a difference of dtype and not of arithmetic.
    """
    random = np.random.default_rng(case.config.seed)
    proximal = logp - random.choice([-1.0, -0.05, 0.05, 1.0], logp.shape)
    others = {
        "proximal_logp": proximal,
        "behavior_logp": proximal + random.normal(0, 0.1, logp.shape),
        "reference_logp": logp + random.normal(0, 0.1, logp.shape),
    }
    tokens = case.compacted.tokens._replace(**{name: x.astype(np.float32) for name, x in others.items()})
    return dataclasses.replace(case, compacted=dataclasses.replace(case.compacted, tokens=tokens))


@dataclasses.dataclass(frozen=True)
class Check:
    """A difference and its bound. NaN exceeds every bound."""

    name: str
    difference: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound


@dataclasses.dataclass(frozen=True)
class Report:
    """The certificate."""

    model: str
    dtype: str
    tokens: int
    whole: tuple[Check, ...]  # checks of the batch
    tensors: tuple[Check, ...]  # checks of single tensors

    @property
    def holds(self) -> bool:
        return all(check.holds for check in (*self.whole, *self.tensors))

    @property
    def verdict(self) -> str:
        return "parity" if self.holds else "NO PARITY"

    def with_optimizers(self, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> Report:
        """Adds the changes of each tensor in two steps on the same gradients."""
        added = _by_tensor("optimizer alone on", ours, theirs, OPTIMIZER_BOUND)
        return dataclasses.replace(self, tensors=(*self.tensors, *added))

    def lines(self, shown: int = 3) -> list[str]:
        """Returns a table and a verdict.

        The table has a line per quantity, and for each kind of tensor check the `shown` tensors
        nearest to their bound.
        """
        kinds: dict[str, list[Check]] = {}
        for check in self.tensors:
            kinds.setdefault(check.name.rpartition(" ")[0], []).append(check)
        worst = [c for kind in kinds.values() for c in sorted(kind, key=_severity, reverse=True)[:shown]]
        checks = [*self.whole, *worst]
        width = max(len(check.name) for check in checks)
        count = max(map(len, kinds.values()), default=0)
        head = f"jax against torch, {self.dtype}, {self.tokens} tokens, {count} tensors (of each kind the worst {shown} shown)"
        return [
            head,
            *(
                f"{c.name:<{width}}  {c.difference:9.2e}  bound {c.bound:7.0e}  {'ok' if c.holds else 'EXCEEDED'}"
                for c in checks
            ),
            f"verdict: {self.verdict}",
        ]

    def write(self, path: Path) -> None:
        """Writes the report as JSON; a difference that is not finite is null. Raises UserError."""
        checks = [
            {
                "name": check.name,
                "difference": check.difference if np.isfinite(check.difference) else None,
                "bound": check.bound,
                "holds": check.holds,
            }
            for check in (*self.whole, *self.tensors)
        ]
        report = {"model": self.model, "dtype": self.dtype, "tokens": self.tokens, "verdict": self.verdict, "checks": checks}
        try:
            path.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"--json: cannot write {path}: {error.strerror}") from None


def compare(case: Case, ours: Result, theirs: Result) -> Report:
    """Compares the results of both paths, except the optimizers alone."""
    bounds, mask = BOUNDS[case.dtype], case.compacted.tokens.mask

    def largest(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(a - b)[mask].max())

    whole = (
        Check("log-prob, max abs, nats", largest(ours.logp, theirs.logp), bounds.logp),
        Check("entropy, max abs, nats", largest(ours.entropy, theirs.entropy), bounds.logp),
        Check("loss, relative", _relative(np.array([ours.loss]), np.array([theirs.loss])), bounds.loss),
    )
    tensors = (
        *_by_tensor("gradient of", ours.gradients, theirs.gradients, bounds.gradient),
        *_by_tensor("optimizer step of", ours.step, theirs.step, bounds.step),
    )
    return Report(str(case.model_dir), case.dtype, int(mask.sum()), whole, tensors)


def _by_tensor(kind: str, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], bound: float) -> list[Check]:
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise UserError(f"the two paths train different tensors: {', '.join(odd[:4])}")
    return [Check(f"{kind} {name}", _relative(ours[name], theirs[name]), bound) for name in ours]


def _severity(check: Check) -> float:
    return check.difference if np.isfinite(check.difference) else np.inf


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    scale = float(np.linalg.norm(b))
    difference = float(np.linalg.norm(a - b))
    return difference / scale if scale else difference


if __name__ == "__main__":
    main.run_main(parity)
