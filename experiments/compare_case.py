"""What experiments.compare asks of each engine, and the greedy completions it gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from rljax.config.schema import Config
from rljax.experiments.compare_report import Differences, Divergence, Layers, Pair


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the prompts that all engines get."""

    config: Config  # greedy, and of one dtype for all engines
    model_dir: Path
    dtype: str
    uids: tuple[str, ...]  # of the prompts
    prompts: tuple[np.ndarray, ...]  # [P] int32 each
    stop_token_ids: tuple[int, ...]

    @property
    def max_new_tokens(self) -> int:
        return self.config.gconfig.max_new_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with a completion."""
        return max(map(len, self.prompts)) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Greedy:
    """A greedy completion, with the log-probs that the engine reported while it decoded."""

    token_ids: np.ndarray  # [T] int32
    logp: np.ndarray  # [T] float64, nats


class Subject(Protocol):
    """An engine whose model is compared. It is made with a `Case`, and loads the model then."""

    def generate(self, prompts: Sequence[np.ndarray]) -> list[Greedy]:
        """Completes the prompts, each token the likeliest, as the engine does it in a run."""
        ...

    def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the log-probs of given tokens: [T] float64, nats; 0 at the first token."""
        ...

    def hidden_states(self, sequence: np.ndarray) -> np.ndarray | None:
        """Returns the embedding, the output of each layer and that of the final norm.

        [L + 2, T, H] float64; None if the engine doesn't show them.
        """
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Results:
    """Completions and log-probs of two engines. Sequences are prompts with completions."""

    completions: Sequence[Greedy]  # of the first engine
    scores: Sequence[np.ndarray]  # of the first engine, of its own sequences
    others: Sequence[Greedy]
    other_scores: Sequence[np.ndarray]  # of the other engine, of the first one's sequences
    checks: Sequence[np.ndarray]  # of the first engine, of the other's sequences

    def pair(self, first: str, other: str, case: Case, layers: Layers | None) -> Pair:
        starts = [len(prompt) for prompt in case.prompts]
        apart = (self._divergence(i, uid, starts[i]) for i, uid in enumerate(case.uids))

        def prompts(scores: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [logp[1:start] for logp, start in zip(scores, starts, strict=True)]

        def completions(scores: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [logp[start:] for logp, start in zip(scores, starts, strict=True)]

        return Pair(
            first,
            other,
            case.dtype,
            len(starts),
            prompt=Differences.of(prompts(self.scores), prompts(self.other_scores)),
            completion=Differences.of(completions(self.scores), completions(self.other_scores)),
            decoded=Differences.of(completions(self.checks), [done.logp for done in self.others]),
            divergences=tuple(d for d in apart if d is not None),
            layers=layers,
        )

    def _divergence(self, i: int, uid: str, start: int) -> Divergence | None:
        ours, theirs = self.completions[i].token_ids, self.others[i].token_ids
        shorter = min(len(ours), len(theirs))
        different = np.flatnonzero(ours[:shorter] != theirs[:shorter])
        if not len(different) and len(ours) == len(theirs):
            return None
        at = int(different[0]) if len(different) else shorter
        token, other = (int(ids[at]) if at < len(ids) else None for ids in (ours, theirs))
        lead = np.nan if token is None or other is None else float(self.scores[i][start + at] - self.checks[i][start + at])
        return Divergence(uid, at, token, other, lead)
