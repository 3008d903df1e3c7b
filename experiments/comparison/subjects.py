"""Comparison of engines, each with the first one; without the flags of experiments.compare."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from rljax.config.registry import nearest
from rljax.errors import UserError
from rljax.experiments.comparison.case import Case, Greedy, Subject
from rljax.experiments.comparison.report import Differences, Divergence, Layers, Pair, layers_apart

SUBJECTS = {
    "transformers": "rljax.experiments.comparison.transformers_subject:TransformersSubject",
    "jax": "rljax.experiments.comparison.jax_subject:JaxSubject",
    "sglang": "rljax.experiments.comparison.sglang_subject:SglangSubject",
}


def check(names: list[str]) -> list[str]:
    """Checks the engines of --engines. Raises UserError."""
    for name in names:
        if name not in SUBJECTS:
            raise UserError(f"--engines: no such engine: {name} ({nearest(name, SUBJECTS)})")
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise UserError(f"--engines: {','.join(names)} (at least two of {', '.join(SUBJECTS)}, each once)")
    return names


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
        ours, theirs = self.completions[i], self.others[i]
        shorter = min(len(ours.token_ids), len(theirs.token_ids))
        different = np.flatnonzero(ours.token_ids[:shorter] != theirs.token_ids[:shorter])
        if not len(different) and len(ours.token_ids) == len(theirs.token_ids):
            return None
        at = int(different[0]) if len(different) else shorter
        lead = ours.scored(at, self.scores[i][start:]) - theirs.scored(at, self.checks[i][start:])
        return Divergence(uid, at, ours.token(at), theirs.token(at), lead)


def compare(case: Case, engines: list[str], other_dir: Path, *, with_layers: bool) -> list[Pair]:
    """Compares each engine with the first one; two models are in memory at a time."""
    first = _made(engines[0], case)
    try:
        completions = _completed(first, case)
        sequences = [_joined(prompt, done) for prompt, done in zip(case.prompts, completions, strict=True)]
        scores = first.score(sequences)
        states = first.hidden_states(case.prompts[0]) if with_layers else None
        pairs = []
        for name in engines[1:]:
            other = _made(name, dataclasses.replace(case, model_dir=other_dir))
            try:
                theirs = _completed(other, case)
                their_scores = other.score(sequences)
                their_states = None if states is None else other.hidden_states(case.prompts[0])
            finally:
                other.close()
            checks = first.score([_joined(prompt, done) for prompt, done in zip(case.prompts, theirs, strict=True)])
            results = Results(completions, scores, theirs, their_scores, checks)
            layers = None if states is None or their_states is None else layers_apart(states, their_states)
            pairs.append(results.pair(engines[0], name, case, layers))
    finally:
        first.close()
    return pairs


def _made(name: str, case: Case) -> Subject:
    module, _, cls = SUBJECTS[name].partition(":")
    try:
        return cast("Subject", getattr(importlib.import_module(module), cls)(case))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise UserError(f"--engines: {name}: {error.name} is not installed (pip install 'rljax[torch]>=0.1')") from None


def _completed(subject: Subject, case: Case) -> list[Greedy]:
    """Completes the prompts, up to where a model would read a picture that is not there."""
    return [done.before(case.mark_ids) for done in subject.generate(case.prompts)]


def _joined(prompt: np.ndarray, completion: Greedy) -> np.ndarray:
    return np.concatenate([prompt, completion.token_ids])
