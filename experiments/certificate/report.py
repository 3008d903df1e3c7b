"""The report of experiments.parity: differences, their bounds, and a verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from rljax.errors import UserError
from rljax.experiments import main
from rljax.experiments.certificate.bounds import ResultBounds, UpdateBounds
from rljax.experiments.certificate.case import Case, Result, Tensors, Update, Vector

# For the optimizers alone: optax corrects the moments' bias in float32, whatever their dtype.
OPTIMIZER_BOUND = 1e-6


@dataclasses.dataclass(frozen=True)
class Check:
    """A difference and its bound. NaN exceeds every bound."""

    name: str
    difference: float
    bound: float
    tensor: str = ""  # "" for a check of the batch

    @property
    def holds(self) -> bool:
        return bool(self.difference <= self.bound)

    @property
    def line(self) -> str:
        return f"{self.name} {self.tensor}".rstrip()


@dataclasses.dataclass(frozen=True)
class Report:
    """The certificate."""

    case: Case
    checks: tuple[Check, ...]
    left_out: tuple[str, ...] = ()  # what is not certified, a line each

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def verdict(self) -> str:
        return "parity" if self.holds else "NO PARITY"

    @property
    def tokens(self) -> int:
        return sum(int(t.loss_mask.sum()) for t in self.case.trajectories)

    def lines(self, shown: int = 2) -> list[str]:
        """Returns a table and a verdict.

        The table has a line per quantity, and for each kind of tensor check the `shown` tensors
        nearest to their bound.
        """
        kinds: dict[str, list[Check]] = {}
        for check in self.checks:
            kinds.setdefault(check.name, []).append(check)
        checks = [c for kind in kinds.values() for c in sorted(kind, key=_severity, reverse=True)[:shown]]
        width = max(len(check.line) for check in checks)
        count, dtype = max(map(len, kinds.values())), self.case.config.actor.dtype
        head = f"engines against float64, {dtype}, {self.tokens} tokens, {count} tensors (of each kind the worst {shown} shown)"
        return [
            head,
            *(
                f"{c.line:<{width}}  {c.difference:9.2e}  bound {c.bound:7.0e}  {'ok' if c.holds else 'EXCEEDED'}"
                for c in checks
            ),
            *self.left_out,
            f"verdict: {self.verdict}",
        ]

    def write(self, path: Path) -> None:
        """Writes the report as JSON; a difference that is not finite is null. Raises UserError."""
        checks = [
            {
                "name": check.line,
                "difference": check.difference if np.isfinite(check.difference) else None,
                "bound": check.bound,
                "holds": check.holds,
            }
            for check in self.checks
        ]
        report = {
            "model": main.FROM_SCRATCH if self.case.config.actor.init_from_scratch else str(self.case.model_dir),
            "dtype": self.case.config.actor.dtype,
            "tokens": self.tokens,
            "verdict": self.verdict,
            "left_out": list(self.left_out),
            "checks": checks,
        }
        try:
            path.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"--json: cannot write {path}: {error.strerror}") from None


def against_oracle(engine: str, bounds: ResultBounds, result: Result, right: Result) -> list[Check]:
    """Checks the results of an engine's learner."""
    checks = [
        Check(f"{engine}: log-prob, max abs, nats", _largest(result.logp, right.logp), bounds.logp),
        *_update(f"{engine}:", result.policy, right.policy, bounds.policy),
    ]
    if result.grad_norm is not None:
        difference = _relative(result.grad_norm, right.policy.norm)
        checks.append(Check(f"{engine}: gradient norm, relative", difference, bounds.policy.norm))
    if right.policy.entropy is not None:
        difference = np.nan if result.policy.entropy is None else abs(result.policy.entropy - right.policy.entropy)
        checks.append(Check(f"{engine}: entropy, mean, nats", difference, bounds.logp))
    for name, ours, theirs, bound in (
        ("reference's log-prob, max abs, nats", result.reference, right.reference, bounds.reference),
        ("critic's value, max abs", result.values, right.values, bounds.values),
    ):
        if theirs is not None:
            checks.append(Check(f"{engine}: {name}", np.nan if ours is None else _largest(ours, theirs), bound))
    if right.critic is not None and result.critic is not None and bounds.critic is not None:
        checks += _update(f"{engine}: critic's", result.critic, right.critic, bounds.critic)
    return checks


def of_sampler(engine: str, bound: float, sampled: Vector, right: Vector) -> Check:
    """Checks the log-probs that came with completions."""
    return Check(f"{engine}: sampler's log-prob, max abs, nats", _largest(sampled, right), bound)


def of_steps(bounds: ResultBounds, ours: Update, theirs: Update) -> list[Check]:
    """Compares the two learners' changes of master weights."""
    return _by_tensor("both: optimizer step of", ours.step, theirs.step, bounds.steps)


def of_optimizers(ours: Tensors, theirs: Tensors) -> list[Check]:
    """Compares changes of each tensor in two steps on the same gradients."""
    return _by_tensor("both: optimizer alone on", ours, theirs, dict.fromkeys(ours, OPTIMIZER_BOUND))


def _update(prefix: str, ours: Update, theirs: Update, bounds: UpdateBounds) -> list[Check]:
    return [
        Check(f"{prefix} loss, relative", _relative(ours.loss, theirs.loss), bounds.loss),
        *_by_tensor(f"{prefix} gradient of", ours.gradients, theirs.gradients, bounds.gradients),
    ]


def _by_tensor(kind: str, ours: Tensors, theirs: Tensors, bounds: Mapping[str, float]) -> list[Check]:
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise UserError(f"{kind}: other tensors are trained than should be: {', '.join(odd[:4])}")
    return [Check(kind, _relative(ours[name], theirs[name]), bounds[name], name) for name in ours]


def failed(checks: Iterable[Check]) -> set[str]:
    """Returns the names of the checks that don't hold, without tensors."""
    return {check.name for check in checks if not check.holds}


def _severity(check: Check) -> float:
    return check.difference if np.isfinite(check.difference) else np.inf


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def _relative(a: np.ndarray | float, b: np.ndarray | float) -> float:
    """Norm of the difference over the norm of b, or over 1 where b is 0."""
    a, b = np.ravel(np.asarray(a, np.float64)), np.ravel(np.asarray(b, np.float64))
    scale, difference = float(np.linalg.norm(b)), float(np.linalg.norm(a - b))
    return difference / scale if scale else difference
