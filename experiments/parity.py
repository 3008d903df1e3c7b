"""The parity certificate of a config: its model and its objective, on the JAX path and on the torch path, side by side.

python -m experiments.parity --config=configs/quickstart.py
python -m experiments.parity --config=configs/smollm2_gsm8k.py --config.actor.path=DIR --dtype=float64

Both paths load the same model directory and get the same random tokens, advantages and stale log-probs. Compared are
log-probs, entropies, the loss of the config's objective, and the gradient of every tensor by its Hugging Face name; each has
a bound, by dtype. Exit status 0 when all hold, else 1. Needs the extra [torch].
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
from absl import flags

from experiments import main
from rljax.compaction import Compacted, compact, kept
from rljax.config import Config
from rljax.errors import UserError
from rljax.objective import Objective

main.define_config_flags(workdir=False)
DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float64", "float32", "bfloat16"], "Of parameters and arithmetic, on both paths."
)
ROWS = flags.DEFINE_integer("rows", 4, "Sequences.", lower_bound=1)
LENGTH = flags.DEFINE_integer("length", 64, "Tokens a sequence; the first quarter is the prompt.", lower_bound=4)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What two right implementations may differ by."""

    logp: float  # nats, largest
    loss: float  # relative
    gradient: float  # norm of the difference over the norm, of each tensor


# In float64 what remains is the norms and rotations that transformers and our model compute in float32 whatever the dtype.
# In bfloat16 every layer rounds in its own order: each path alone is about 2% from the float32 gradient of a four-layer model.
BOUNDS = {
    "float64": Bounds(1e-5, 1e-6, 1e-5),
    "float32": Bounds(1e-3, 1e-4, 1e-3),
    "bfloat16": Bounds(0.25, 0.05, 0.1),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What both paths are given."""

    config: Config
    model_dir: Path
    objective: Objective
    token_ids: np.ndarray  # [R, T] int32
    compacted: Compacted  # the trained tokens, [R, m]
    dtype: str

    @property
    def positions(self) -> np.ndarray:
        return np.broadcast_to(np.arange(self.token_ids.shape[1], dtype=np.int32), self.token_ids.shape).copy()


@dataclasses.dataclass(frozen=True)
class Result:
    """What a path makes of it, in float64."""

    logp: np.ndarray  # [R, m]
    entropy: np.ndarray  # [R, m]
    loss: float
    gradients: dict[str, np.ndarray]  # by tensor name


def parity() -> None:
    from rljax import config_checks, config_io, model_directory

    config = main.config_from_flags()
    config_checks.check(config)
    config = config_io.resolve(config)
    try:
        from experiments import parity_torch
    except ImportError as error:
        raise UserError(f"{error.name}: not installed (pip install 'rljax[torch]')") from error
    from experiments import parity_jax

    with tempfile.TemporaryDirectory() as scratch:
        model_dir = model_directory.prepare(config.actor, Path(scratch) / "init", seed=config.seed)
        case = make_case(config, model_dir, DTYPE.value, ROWS.value, LENGTH.value)
        case = with_policies_near(case, parity_jax.run(case)[0])
        ours, theirs = Result(*parity_jax.run(case)), Result(*parity_torch.run(case))
    lines, holds = certificate(case, ours, theirs)
    print("\n".join(lines))
    sys.exit(0 if holds else 1)


def make_case(config: Config, model_dir: Path, dtype: str, rows: int, length: int) -> Case:
    """Random tokens and advantages; the other policies know nothing yet."""
    from rljax.aggregation import loss_weights
    from rljax.batch import Batch
    from rljax.hf.spec import ModelSpec

    objective = Objective.from_config(config)
    vocabulary = ModelSpec.from_directory(model_dir).vocab_size
    random = np.random.default_rng(config.seed)
    shape = (rows, length)
    loss_mask = np.broadcast_to(np.arange(length) >= length // 4, shape).copy()
    constant = config.actor.loss_aggregation_constant or config.gconfig.max_new_tokens
    weights = loss_weights(list(loss_mask), config.actor.loss_aggregation, constant)

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
    return Case(config, model_dir, objective, batch.token_ids, compact(batch, kept(batch, objective)), dtype)


def with_policies_near(case: Case, logp: np.ndarray) -> Case:
    """Proximal, behavior and reference log-probs around the model's own. Ratios are well inside the clip or well outside: a
    token that rounding carries over its edge would be a difference of dtype and not of arithmetic."""
    random = np.random.default_rng(case.config.seed)
    proximal = logp - random.choice([-1.0, -0.05, 0.05, 1.0], logp.shape)
    others = {
        "proximal_logp": proximal,
        "behavior_logp": proximal + random.normal(0, 0.1, logp.shape),
        "reference_logp": logp + random.normal(0, 0.1, logp.shape),
    }
    tokens = case.compacted.tokens._replace(**{name: x.astype(np.float32) for name, x in others.items()})
    return dataclasses.replace(case, compacted=dataclasses.replace(case.compacted, tokens=tokens))


def certificate(case: Case, ours: Result, theirs: Result) -> tuple[list[str], bool]:
    """A table with one line a quantity, the tensors by the worst few, and a verdict."""
    bounds, mask = BOUNDS[case.dtype], case.compacted.tokens.mask

    def largest(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(a - b)[mask].max())

    if ours.gradients.keys() != theirs.gradients.keys():
        odd = sorted(ours.gradients.keys() ^ theirs.gradients.keys())
        raise UserError(f"{case.model_dir}: the two paths train different tensors: {', '.join(odd[:4])}")
    by_tensor = {name: _relative(ours.gradients[name], theirs.gradients[name]) for name in ours.gradients}
    worst = sorted(by_tensor, key=lambda name: by_tensor[name], reverse=True)[:5]
    checks: list[tuple[str, float, float]] = [
        ("log-prob, max abs, nats", largest(ours.logp, theirs.logp), bounds.logp),
        ("entropy, max abs, nats", largest(ours.entropy, theirs.entropy), bounds.logp),
        ("loss, relative", _relative(np.array([ours.loss]), np.array([theirs.loss])), bounds.loss),
        *((f"gradient of {name}", by_tensor[name], bounds.gradient) for name in worst),
    ]
    holds = all(difference <= bound for _, difference, bound in checks)  # NaN does not
    width = max(len(name) for name, _, _ in checks)
    lines = [f"jax against torch, {case.dtype}, {mask.sum()} tokens, {len(by_tensor)} tensors (the worst {len(worst)} shown)"]
    lines += [
        f"{name:<{width}}  {difference:9.2e}  bound {bound:7.0e}  {'ok' if difference <= bound else 'EXCEEDED'}"
        for name, difference, bound in checks
    ]
    return [*lines, f"verdict: {'parity' if holds else 'NO PARITY'}"], holds


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    scale = float(np.linalg.norm(b))
    difference = float(np.linalg.norm(a - b))
    return difference / scale if scale else difference


if __name__ == "__main__":
    main.run_main(parity)
