"""Rotary position embeddings: parsing them from a config, and their angular frequencies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rljax import json_fields
from rljax.errors import UserError

TYPES = ("default", "linear", "llama3", "yarn")
_FACTOR = json_fields.number(1e-3, 1e6)
SCHEMA: json_fields.Schema = {
    **dict.fromkeys(("rope_type", "type"), json_fields.TEXT),
    "rope_theta": json_fields.number(1, 1e12),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("mscale", "mscale_all_dim"), json_fields.number(0, 1e6)),
    "attention_factor": json_fields.number(0, 1e6),
    "original_max_position_embeddings": json_fields.integer(1, 2**31),
    "truncate": json_fields.TRUTH,
    **dict.fromkeys(("full_attention", "sliding_attention"), json_fields.OBJECT),
}


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """One kind of rotary embedding; Gemma 3 has two, one for sliding and one for full layers.

    Example: RopeSpec(500000.0, "llama3", factor=8.0, original_length=8192, low_freq_factor=1.0,
    high_freq_factor=4.0)
    """

    theta: float
    type: str = "default"
    factor: float = 1.0  # how many times longer than the original length
    original_length: int = 0  # tokens, of pre-training; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp begins and ends at whole dimensions
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it


def parse_rope(fields: Mapping[str, Any], theta: float, max_length: int, where: str) -> RopeSpec:
    """Parses the `rope_parameters` or `rope_scaling` object of a config.

    Args:
      theta: used where the object has no `rope_theta` of its own.
      max_length: `max_position_embeddings`, tokens.
      where: the config's path, for the error.

    Raises:
      UserError: a type that is not implemented, or a field of it that is missing.
    """
    json_fields.check(fields, SCHEMA, f"{where}: rope")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = float(fields.get("rope_theta") or theta)
    if kind not in TYPES:
        why = " (its frequencies change with the length, so no key could be cached)" if kind == "dynamic" else ""
        raise UserError(f"{where}: rope type {kind!r} is not implemented{why}; implemented: {', '.join(TYPES)}")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(f"{where}: partial_rotary_factor {fields['partial_rotary_factor']} is not implemented; only 1")
    if kind == "default":
        return RopeSpec(theta)
    try:
        if kind == "linear":
            return RopeSpec(theta, kind, factor=float(fields["factor"]))
        original = int(fields.get("original_max_position_embeddings") or max_length)
        if kind == "llama3":
            low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
            if low >= high:
                raise UserError(f"{where}: rope: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
            return RopeSpec(theta, kind, float(fields["factor"]), original, low_freq_factor=low, high_freq_factor=high)
        factor = float(fields.get("factor") or max_length / original)
        return RopeSpec(
            theta,
            kind,
            factor,
            original,
            beta_fast=float(fields.get("beta_fast") or 32.0),
            beta_slow=float(fields.get("beta_slow") or 1.0),
            truncate=bool(fields.get("truncate", True)),
            attention_factor=_yarn_attention_factor(fields, factor),
        )
    except KeyError as error:
        raise UserError(f"{where}: rope type {kind!r} needs {error.args[0]!r}") from None
    except TypeError:
        raise UserError(f"{where}: rope type {kind!r} has null in place of a number") from None


def rope_fields(rope: RopeSpec) -> dict[str, Any]:
    """Returns a `rope_parameters` object; the inverse of `parse_rope`."""
    fields: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type != "default":
        fields["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_length
    if rope.type == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        fields["attention_factor"] = rope.attention_factor
    return fields


def frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Returns the angle that one position adds to each pair of dimensions.

    [head_dim / 2] float32, radians per token. Su et al. 2021, arXiv:2104.09864 (default); linear
    interpolation: Chen et al. 2023, arXiv:2306.15595; llama3: Llama 3.1; yarn: Peng et al. 2023,
    arXiv:2309.00071.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / (np.float32(rope.theta) ** exponent)).astype(np.float32)
    if rope.type == "linear":
        return (base / np.float32(rope.factor)).astype(np.float32)
    if rope.type == "llama3":
        return _llama3(base, rope)
    if rope.type == "yarn":
        return _yarn(base, rope, head_dim)
    return base


def _llama3(base: np.ndarray, rope: RopeSpec) -> np.ndarray:
    """Stretches long waves by `factor`, keeps short ones, and interpolates between them."""
    turns = rope.original_length * base / (2 * math.pi)  # of each wave over the original length
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return ((1 - kept) * base / rope.factor + kept * base).astype(np.float32)


def _yarn(base: np.ndarray, rope: RopeSpec, head_dim: int) -> np.ndarray:
    """Keeps dimensions of many turns over the original length and stretches those of few.

    More than beta_fast turns are many, fewer than beta_slow few; between them it interpolates.
    """

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)  # a ramp of no width is a step
    stretched = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
    return (base / rope.factor * stretched + base * (1 - stretched)).astype(np.float32)


def _yarn_attention_factor(fields: Mapping[str, Any], factor: float) -> float:
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return scale(float(fields["mscale"])) / scale(float(fields["mscale_all_dim"]))
    return scale(1.0)
