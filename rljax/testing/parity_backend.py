"""Interface of a backend's arithmetic to the parity suite: arrays in and out, and gradients."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from rljax.objective.spec import Objective, TokenArrays

DTYPES = ("float64", "float32", "bfloat16")
# Arithmetic is in float32 at least, so that only gradients, which come back in the inputs' dtype, are rounded to bfloat16.
VALUE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5}
GRADIENT = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2**-7}

BY_TOKEN = Objective(clip_high=0.28, dual_clip=3.0, weight_cap=2.0, kl_coef=0.1, entropy_coef=0.02)
OBJECTIVES = [
    BY_TOKEN,
    Objective(weight_cap=2.0, cap_mode="mask", cap_level="sequence"),
    Objective(decoupled=False, proximal="behavior", clip_high=0.28),
    Objective(ratio_level="sequence", clip_low=0.05, clip_high=0.05, kl_coef=0.1, kl_estimator="k1"),
    Objective(loss="cispo", clip_low=1.0, clip_high=0.3, entropy_coef=0.1, weight_cap=5.0),
    Objective(proximal="interpolated", weight_cap=5.0),
    Objective(distill_coef=0.7, weight_cap=2.0),
    Objective(ratio_level="sequence", clip_low=0.05, clip_high=0.05, kl_coef=0.1, distill_coef=0.3),
    Objective(loss="sft"),
]


class Backend(abc.ABC):
    """Base of `ParitySuite`; a subclass sets functions as `staticmethod(...)`.

    Example:

        class TestMyBackend(ParitySuite):
            losses = my_losses
            token_logprobs = staticmethod(my_logprobs.token_logprobs)
            policy_objective = staticmethod(my_objective.policy_objective)
            value_objective = staticmethod(my_objective.value_objective)
            # and array, numpy, gradient
    """

    losses: ModuleType  # the terms
    token_logprobs: Callable[..., Any]
    policy_objective: Callable[..., Any]
    value_objective: Callable[..., Any]
    fused_objective: Callable[..., Any] | None = None  # None: the backend has none

    @abc.abstractmethod
    def array(self, x: np.ndarray, dtype: str) -> Any:
        """Converts to the backend's array of dtype "float64", "float32" or "bfloat16".

        bool and int arrays keep their kind.
        """

    @abc.abstractmethod
    def numpy(self, x: Any) -> np.ndarray:
        """Converts a backend's array of any dtype to float64 (or bool or int) numpy."""

    @abc.abstractmethod
    def gradient(self, function: Callable[..., Any], arrays: Sequence[Any], *rest: Any) -> tuple[Any, Sequence[Any]]:
        """Returns the scalar function(*arrays, *rest), and its gradient in each of arrays.

        The same function object comes again with other arrays, so that a compiled form of it may be
        kept.
        """

    def precision(self, dtype: str) -> contextlib.AbstractContextManager[Any]:
        """Context of all work in one dtype, for backends that must be told about float64."""
        return contextlib.nullcontext()

    # Helpers

    def _rounded(self, case: dict[str, np.ndarray], dtype: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns the backend's arrays, and their rounded values for the oracle."""
        ours = {name: self.array(array, dtype) for name, array in case.items()}
        return ours, {name: self.numpy(array) for name, array in ours.items()}


def assert_close(ours: np.ndarray, exact: np.ndarray, tolerance: float, floor: float = 0.0) -> None:
    """Asserts that the largest difference is at most tolerance times the largest entry.

    The largest entry counts as `floor` at least.
    """
    assert ours.shape == exact.shape
    assert np.isfinite(ours).all()
    if exact.size:
        assert np.abs(ours - exact).max() <= tolerance * max(np.abs(exact).max(), floor)


def tokens_of(arrays: dict[str, Any]) -> TokenArrays:
    return TokenArrays(
        loss_weight=arrays["weight"],
        **{
            name: arrays[name]
            for name in (
                "mask",
                "advantage",
                "behavior_logp",
                "segment_ids",
                "proximal_logp",
                "reference_logp",
                "teacher_logp",
                "interpolation",
            )
        },
    )
