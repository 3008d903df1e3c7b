"""The comparison of two engines: where greedy tokens part, how far log-probs are apart, a verdict.

prompt tokens        both score the prompt's own text
completion tokens    both score the completion of the first
decoded tokens       what the second reported while it decoded, beside the first's score of the same
greedy tokens        the first token at which the completions differ; a near-tie is no disagreement
layers               hidden states of one prompt, layer by layer
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rljax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Differences allowed between two right implementations of one dtype."""

    mean: float  # nats, of the absolute difference per token
    p99: float  # nats
    max: float  # nats
    layer: float  # norm of the difference of a token's hidden state over its norm

    @property
    def tie(self) -> float:
        """Nats by which the likeliest token may lead another that is chosen in its place.

        The log-probs of both may be off by `max`, in opposite directions.
        """
        return 2 * self.max


# Of bfloat16, mean and p99 are about twice what two sound engines were seen apart on a real model (docs/compare.md).
BOUNDS = {
    "float32": Bounds(mean=1e-4, p99=1e-3, max=1e-2, layer=1e-2),
    "bfloat16": Bounds(mean=0.1, p99=0.75, max=1.0, layer=0.2),
}


@dataclasses.dataclass(frozen=True)
class Differences:
    """Absolute differences of log-probs, nats. NaN exceeds every bound."""

    tokens: int
    mean: float
    p99: float
    max: float

    @classmethod
    def of(cls, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Differences:
        apart = np.concatenate([np.abs(a - b) for a, b in zip(ours, theirs, strict=True)])
        if not len(apart):
            return cls(0, 0.0, 0.0, 0.0)
        return cls(len(apart), float(apart.mean()), float(np.quantile(apart, 0.99)), float(apart.max()))

    def within(self, bounds: Bounds) -> bool:
        return self.mean <= bounds.mean and self.p99 <= bounds.p99 and self.max <= bounds.max


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token at which two greedy completions of a prompt differ."""

    uid: str
    position: int  # in the completion
    token: int | None  # of the first engine; None: its completion has ended
    other: int | None
    lead: float  # nats by which the first engine finds its own token likelier; NaN where one has ended

    def is_tie(self, bounds: Bounds) -> bool:
        return self.lead <= bounds.tie


@dataclasses.dataclass(frozen=True)
class Layers:
    """Relative differences of hidden states, the largest of any token."""

    tokens: int
    names: tuple[str, ...]
    differences: tuple[float, ...]

    def first(self, bounds: Bounds) -> str | None:
        """Returns the first layer beyond the bound."""
        beyond = (name for name, x in zip(self.names, self.differences, strict=True) if not x <= bounds.layer)
        return next(beyond, None)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Comparison of an engine with the first one."""

    first: str
    other: str
    dtype: str
    prompts: int
    prompt: Differences
    completion: Differences
    decoded: Differences
    divergences: tuple[Divergence, ...]  # of the prompts whose completions differ
    layers: Layers | None = None

    @property
    def bounds(self) -> Bounds:
        return BOUNDS[self.dtype]

    @property
    def disagreements(self) -> tuple[Divergence, ...]:
        return tuple(d for d in self.divergences if not d.is_tie(self.bounds))

    @property
    def first_layer(self) -> str | None:
        return None if self.layers is None else self.layers.first(self.bounds)

    @property
    def agrees(self) -> bool:
        within = all(part.within(self.bounds) for part in (self.prompt, self.completion, self.decoded))
        return within and not self.disagreements and self.first_layer is None

    def lines(self) -> list[str]:
        """Returns a table and the verdict."""
        bounds, apart = self.bounds, len(self.divergences)
        lines = [
            f"{self.other} beside {self.first}, {self.dtype}, {self.prompts} prompts",
            f"{'log-probs, nats apart':<24}{'tokens':>8}{'mean':>11}{'p99':>11}{'max':>11}",
        ]
        for name, part in (("prompt", self.prompt), ("completion", self.completion), ("decoded", self.decoded)):
            shown = "" if part.within(bounds) else "  EXCEEDED"
            lines.append(f"  {name:<22}{part.tokens:>8}{part.mean:>11.1e}{part.p99:>11.1e}{part.max:>11.1e}{shown}")
        lines.append(f"  {'bound':<22}{'':>8}{bounds.mean:>11.1e}{bounds.p99:>11.1e}{bounds.max:>11.1e}")
        lines.append(
            f"greedy tokens: {self.prompts - apart} of {self.prompts} completions equal, {apart - len(self.disagreements)} part"
            f" at a near-tie (a lead of at most {bounds.tie:g} nats), {len(self.disagreements)} disagree"
        )
        for d in (*self.disagreements, *(d for d in self.divergences if d.is_tie(bounds)))[:5]:
            kind = "near-tie" if d.is_tie(bounds) else "disagreement"
            lines.append(f"  prompt {d.uid}, token {d.position}: {d.token} and {d.other}, lead {d.lead:.1e} nats, {kind}")
        if self.layers is not None:
            lines += self._layer_lines(self.layers)
        return [*lines, f"verdict: {self.verdict}"]

    def _layer_lines(self, layers: Layers) -> list[str]:
        lines = [f"hidden states of {layers.tokens} tokens, relative, bound {self.bounds.layer:.0e}"]
        for name, x in zip(layers.names, layers.differences, strict=True):
            lines.append(f"  {name:<22}{x:>11.1e}{'' if x <= self.bounds.layer else '  EXCEEDED'}")
        return lines

    @property
    def verdict(self) -> str:
        if self.agrees:
            return "consistent"
        where = "" if self.first_layer is None else f"; {self.first_layer} differs first"
        return f"INCONSISTENT{where}"

    def to_json(self) -> dict[str, object]:
        """Returns JSON values; a number that is not finite is null."""
        parts = {"prompt": self.prompt, "completion": self.completion, "decoded": self.decoded}
        return {
            "first": self.first,
            "other": self.other,
            "dtype": self.dtype,
            "prompts": self.prompts,
            "verdict": self.verdict,
            "agrees": self.agrees,
            "bounds": dataclasses.asdict(self.bounds) | {"tie": self.bounds.tie},
            "differences": {name: _finite(dataclasses.asdict(part)) for name, part in parts.items()},
            "divergences": [_finite(dataclasses.asdict(d)) | {"near_tie": d.is_tie(self.bounds)} for d in self.divergences],
            "layers": None
            if self.layers is None
            else {
                "first": self.first_layer,
                "differences": _finite(dict(zip(self.layers.names, self.layers.differences, strict=True))),
            },
        }


def _finite(values: dict[str, object]) -> dict[str, object]:
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in values.items()}


def layers_apart(ours: np.ndarray, theirs: np.ndarray) -> Layers:
    """Compares hidden states [L + 2, T, H] of the embedding, the layers and the final norm."""
    apart = np.linalg.norm(ours - theirs, axis=-1) / np.maximum(np.linalg.norm(ours, axis=-1), np.finfo(np.float32).tiny)
    names = ("embedding", *(f"layer {i}" for i in range(len(ours) - 2)), "final norm")
    return Layers(ours.shape[1], names, tuple(float(x) for x in apart.max(1)))


def write_json(path: Path, model: str, pairs: Sequence[Pair]) -> None:
    """Writes the whole report. Raises UserError."""
    report = {"model": model, "agrees": all(pair.agrees for pair in pairs), "pairs": [pair.to_json() for pair in pairs]}
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json: cannot write {path}: {error.strerror}") from None
