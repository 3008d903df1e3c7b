"""Splits of a model over devices: what each engine needs its dims to divide."""

from __future__ import annotations

from rljax.config.schema import ModelConfig
from rljax.errors import UserError
from rljax.hf.spec import ModelSpec

Shape = ModelSpec | ModelConfig  # of a model, or of one that is made from scratch


def check_tensor(spec: Shape, tensor: int, *, key_heads: bool) -> None:
    """Checks that a tensor-parallel group gets equal parts of a model.

    Args:
      tensor: devices of the group.
      key_heads: they are split too; False: an engine keeps them whole, or copies them.

    Raises UserError for what it does not divide.
    """
    _divides("t", tensor, spec.num_heads, "attention heads")
    if key_heads:
        _divides("t", tensor, spec.num_kv_heads, "key/value heads")
    _divides("t", tensor, spec.intermediate_size, "units of the feed-forward")


def check_copied_heads(spec: Shape, tensor: int) -> None:
    """Checks that a group which is larger than the key/value heads has each as often as another.

    Raises UserError.
    """
    heads = spec.num_kv_heads
    if tensor % heads and heads % tensor:
        raise UserError(
            f"allocation_mode: t{tensor} is neither a divisor nor a multiple of the model's {heads} key/value heads"
            " (use another t)"
        )


def check_shards(spec: Shape, fsdp: int) -> None:
    """Checks that shards get equal parts of a hidden state's elements. Raises UserError."""
    _divides("f", fsdp, spec.hidden_size, "elements of a hidden state")


def _divides(dim: str, parts: int, count: int, what: str) -> None:
    if count % parts:
        raise UserError(f"allocation_mode: {dim}{parts} does not divide the model's {count} {what} (use a smaller {dim})")
