"""Choice of a run's attention: the one that `jax.attention` names, or the first that can do it on
these devices.
"""

from __future__ import annotations

import logging

import jax

from rljax.backends.jax.attention.cudnn import CudnnAttention
from rljax.backends.jax.attention.interface import Attention, Problem
from rljax.backends.jax.attention.splash import SplashAttention
from rljax.backends.jax.attention.tokamax import TokamaxAttention
from rljax.backends.jax.attention.xla import XlaAttention
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec

log = logging.getLogger(__name__)

AUTO = "auto"
# Fastest first; the last can do everything.
IMPLEMENTATIONS: dict[str, Attention] = {
    attention.name: attention for attention in (CudnnAttention(), SplashAttention(), TokamaxAttention(), XlaAttention())
}


def problem_of(spec: ModelSpec, dtype: str, device: jax.Device, length: int) -> Problem:
    """The attention of a model on a device, over rows of `length` tokens at most."""
    capability = getattr(device, "compute_capability", None)
    major, _, minor = capability.partition(".") if isinstance(capability, str) else ("", "", "")
    return Problem(
        platform=device.platform,
        capability=(int(major), int(minor)) if major else None,
        dtype=dtype,
        head_dim=spec.head_dim,
        softcap=spec.attention_softcap,
        windows=tuple(dict.fromkeys(None if size is None or size >= length else size for size in spec.windows)),
    )


def able_or_plain(attention: Attention, problem: Problem, model: str) -> Attention:
    """Returns the attention of another model's rows, which were cut for this one.

    It is the plain kind where this one can't do that model, which is said.

    Args:
      model: config key of the other model.
    """
    refusal = attention.refusal(problem)
    if refusal is None:
        return attention
    log.info("%s: %s attention, for %s can't: %s", model, XlaAttention().name, attention.name, refusal)
    return XlaAttention()


def choose(name: str, problem: Problem) -> Attention:
    """The implementation of that name, or for "auto" the first that can. Says once which it is,
    and why none before it.

    Raises UserError where there is none of that name, or it can't.
    """
    if name not in (AUTO, *IMPLEMENTATIONS):
        raise UserError(f"jax.attention: no {name!r} (there is {', '.join((AUTO, *IMPLEMENTATIONS))})")
    refusals = {other: attention.refusal(problem) for other, attention in IMPLEMENTATIONS.items()}
    able = [other for other, refusal in refusals.items() if refusal is None]
    if name != AUTO:
        if name not in able:
            raise UserError(
                f"jax.attention: {name} can't be used here: {refusals[name]} (of the others, {', '.join(able)} can)"
            )
        log.info("jax.attention: %s", name)
        return IMPLEMENTATIONS[name]
    chosen = able[0]
    before = [f"{other}: {refusal}" for other, refusal in refusals.items() if refusal is not None]
    log.info("jax.attention: %s (%s)", chosen, "; ".join(before[: list(IMPLEMENTATIONS).index(chosen)]) or "the first choice")
    return IMPLEMENTATIONS[chosen]
