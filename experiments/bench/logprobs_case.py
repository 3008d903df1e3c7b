"""Inputs that experiments.bench.logprobs gives to its variants, and the variants' interface."""

from __future__ import annotations

import abc
import dataclasses

import numpy as np

from rljax.objective.spec import Objective, TokenArrays


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs as numpy arrays; hidden and unembedding in the dtype that is benchmarked."""

    hidden: np.ndarray  # [M, H]
    unembedding: np.ndarray  # [V, H]
    labels: np.ndarray  # [M] int32
    tokens: TokenArrays  # [1, M]
    objective: Objective
    temperature: float
    softcap: float | None
    chunk: int

    def head(self, rows: int) -> Case:
        """Returns the first rows, in as many chunks."""
        chunk = max(self.chunk * rows // len(self.hidden), 1)
        tokens = TokenArrays(*(x if x is None else x[:, :rows] for x in self.tokens))
        return dataclasses.replace(self, hidden=self.hidden[:rows], labels=self.labels[:rows], tokens=tokens, chunk=chunk)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of one call as float64 numpy; logp is None if a variant does not return it."""

    logp: np.ndarray | None  # [M]
    d_hidden: np.ndarray  # [M, H]
    d_unembedding: np.ndarray  # [V, H]


class Variant(abc.ABC):
    """One implementation, of one backend."""

    name: str
    exact: bool = True  # True if it computes the same objective, so that its gradients can be checked

    @abc.abstractmethod
    def check(self, case: Case) -> Outcome:
        """Returns one call's results."""

    @abc.abstractmethod
    def measure(self, case: Case, repeats: int) -> tuple[float, float | None]:
        """Returns median seconds per call, and bytes beside inputs and gradients (None if unknown)."""
