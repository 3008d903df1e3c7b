"""Choice of a run's implementation: the one it names, or the first that can do what it needs."""

from __future__ import annotations

from rljax.backends.jax.decode_attention.interface import DecodeAttention, Problem
from rljax.backends.jax.decode_attention.pallas_gpu import PALLAS_GPU
from rljax.backends.jax.decode_attention.pallas_tpu import PALLAS_TPU
from rljax.backends.jax.decode_attention.xla import XLA
from rljax.errors import UserError

# Best first; the last can do everything.
IMPLEMENTATIONS: dict[str, DecodeAttention] = {each.name: each for each in (PALLAS_GPU, PALLAS_TPU, XLA)}
AUTO = "auto"


def choose(name: str, problem: Problem) -> DecodeAttention:
    """The implementation called `name`, or with "auto" the first without a refusal.

    Raises:
      UserError: no such name, or an implementation that can't do this; never replaced by another
        in silence.
    """
    if name == AUTO:
        return next(each for each in IMPLEMENTATIONS.values() if each.refusal(problem) is None)
    if name not in IMPLEMENTATIONS:
        raise UserError(f"jax.decode_attention: no implementation {name!r} (one of {AUTO}, {', '.join(IMPLEMENTATIONS)})")
    chosen = IMPLEMENTATIONS[name]
    if reason := chosen.refusal(problem):
        raise UserError(f"jax.decode_attention={name}: {reason} ({AUTO} takes {choose(AUTO, problem).name} here)")
    return chosen
