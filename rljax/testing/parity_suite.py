"""The parity suite: what a backend's arithmetic must equal, and the invariants it must keep.

A backend subclasses `ParitySuite` and says how arrays go in and out and how a function is differentiated; see
test_jax_parity.py and docs/parity.md. Expectations come from the float64 oracle, from identities, or from invariants.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljax.objective import logprobs as logprob_oracle
from rljax.objective import losses as oracle
from rljax.objective import oracle as objective_oracle
from rljax.objective.spec import PREFIX, Objective, TokenArrays
from rljax.testing.parity_cases import ARRAYS, KINDS, TERMS, M, R, inputs

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

# One test function serves every backend: what hypothesis calls differing executors, harmless with no database.
quick = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.differing_executors]
)
masks = st.lists(st.booleans(), min_size=R * M, max_size=R * M).map(lambda bits: np.array(bits).reshape(R, M))


class ParitySuite(abc.ABC):
    """Subclass it as Test..., fill in what is abstract, and pytest does the rest."""

    losses: ModuleType  # the terms
    token_logprobs: Callable[..., Any]
    policy_objective: Callable[..., Any]
    value_objective: Callable[..., Any]
    fused_objective: Callable[..., Any] | None = None  # None: the backend has none

    @abc.abstractmethod
    def array(self, x: np.ndarray, dtype: str) -> Any:
        """The backend's array of dtype "float64", "float32" or "bfloat16"; bool and int arrays keep their kind."""

    @abc.abstractmethod
    def numpy(self, x: Any) -> np.ndarray:
        """A float64 (or bool or int) numpy array of a backend's array, of any dtype."""

    @abc.abstractmethod
    def gradient(self, function: Callable[..., Any], arrays: Sequence[Any], *rest: Any) -> tuple[Any, Sequence[Any]]:
        """Value of the scalar function(*arrays, *rest), and its gradient in each of arrays. The same function object comes
        again with other arrays, so that a compiled form of it may be kept."""

    def precision(self, dtype: str) -> contextlib.AbstractContextManager[Any]:
        """Entered around everything of one dtype, for backends that must be told about float64."""
        return contextlib.nullcontext()

    # Terms

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name, static", TERMS, ids=str)
    def test_term_equals_the_oracle(self, name: str, static: dict[str, Any], kind: str, dtype: str) -> None:
        with self.precision(dtype):
            ours, exact = self._rounded(inputs(kind), dtype)
            arguments = list(inspect.signature(getattr(oracle, name)).parameters)[: -len(static) or None]
            term = getattr(oracle, name)(*(exact[a] for a in arguments), **static)
            wrt = list(term.grads)
            function = self._term_of(name, tuple(static.items()), tuple(arguments), tuple(wrt))
            rest = [ours[a] for a in arguments if a not in wrt]
            total, grads = self.gradient(function, [ours[a] for a in wrt], *rest)
            scale = np.sum(np.abs(oracle.select(exact["weight"], exact["mask"]))) * 10 + 1e-30
            assert abs(self.numpy(total) - term.sum) <= VALUE[dtype] * max(abs(term.sum), scale)
            for argument, grad in zip(wrt, grads, strict=True):
                assert_close(self.numpy(grad), term.grads[argument], GRADIENT[dtype])
            count = getattr(self.losses, name)(*(ours[a] for a in arguments), **static).count
            assert self.numpy(count) == term.count

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name, static", ARRAYS, ids=str)
    def test_array_equals_the_oracle(self, name: str, static: dict[str, Any], kind: str, dtype: str) -> None:
        with self.precision(dtype):
            ours, exact = self._rounded(inputs(kind), dtype)
            arguments = list(inspect.signature(getattr(oracle, name)).parameters)[: -len(static) or None]
            result = getattr(self.losses, name)(*(ours[a] for a in arguments), **static)
            expected = getattr(oracle, name)(*(exact[a] for a in arguments), **static)
            mask = exact["mask"]
            assert_close(np.where(mask, self.numpy(result), 0), np.where(mask, expected, 0), VALUE[dtype])

    def test_names_arguments_and_docstrings_are_the_oracles(self) -> None:
        for name in {name for name, _ in TERMS + ARRAYS}:
            ours, theirs = getattr(self.losses, name), getattr(oracle, name)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
            assert inspect.getdoc(ours) == inspect.getdoc(theirs), name

    # The objective

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.loss}-{o.ratio_level}-{o.proximal}-{o.cap_level}")
    def test_objective_equals_the_oracle(self, objective: Objective, kind: str, dtype: str) -> None:
        with self.precision(dtype):
            ours, exact = self._rounded(inputs(kind), dtype)
            loss, grads = self._objective(ours, objective)
            expected = objective_oracle.policy_objective(exact["logp"], exact["entropy"], _tokens(exact), objective)
            assert np.isfinite(loss)
            assert abs(loss - expected.loss) <= VALUE[dtype] * (1 + 100 * abs(expected.loss))
            assert_close(grads[0], expected.d_logp, GRADIENT[dtype])
            assert_close(grads[1], expected.d_entropy, GRADIENT[dtype])

    @quick
    @given(masks)
    def test_any_mask_gives_the_oracles_objective(self, mask: np.ndarray) -> None:
        with self.precision("float64"):
            ours, exact = self._rounded(_masked(inputs("stale", 1), mask), "float64")
            loss, grads = self._objective(ours, BY_TOKEN)
            expected = objective_oracle.policy_objective(exact["logp"], exact["entropy"], _tokens(exact), BY_TOKEN)
            assert_close(np.array([loss]), np.array([expected.loss]), 1e-12)
            assert_close(grads[0], expected.d_logp, 1e-12)

    @quick
    @given(st.permutations(range(R)), st.sampled_from(OBJECTIVES))
    def test_permuting_rows_permutes_the_gradient(self, order: list[int], objective: Objective) -> None:
        with self.precision("float64"):
            whole = inputs("stale", 2)
            _, grads = self._objective(self._rounded(whole, "float64")[0], objective)
            _, permuted = self._objective(self._rounded({k: v[order] for k, v in whole.items()}, "float64")[0], objective)
            assert_close(permuted[0], grads[0][order], 1e-13)

    @quick
    @given(masks, st.sampled_from(OBJECTIVES))
    def test_split_invariance_of_loss_and_gradient(self, part: np.ndarray, objective: Objective) -> None:
        """Parts are any sets of tokens where the objective works by token, else any sets of rows."""
        if objective.ratio_level == "sequence" or objective.cap_level == "sequence":
            part = np.repeat(part[:, :1], M, axis=1)
        with self.precision("float64"):
            whole = inputs("stale", 3)
            mask = whole["mask"]
            loss, grads = self._objective(self._rounded(whole, "float64")[0], objective)
            parts = [
                self._objective(self._rounded(_masked(whole, mask & chosen), "float64")[0], objective)
                for chosen in (part, ~part)
            ]
            assert_close(np.array([sum(loss for loss, _ in parts)]), np.array([loss]), 1e-12)
            for i in range(2):
                assert_close(parts[0][1][i] + parts[1][1][i], grads[i], 1e-12)

    @pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.loss}-{o.ratio_level}-{o.proximal}-{o.cap_level}")
    def test_padding_changes_nothing(self, objective: Objective) -> None:
        columns = 3
        with self.precision("float64"):
            whole = inputs("clipped", 4)
            padded = {
                name: np.concatenate(
                    [array, np.full((R, columns, *array.shape[2:]), np.nan).astype(array.dtype) * (array.dtype.kind == "f")], 1
                ).astype(array.dtype)
                for name, array in whole.items()
                if array.dtype.kind == "f"
            } | {name: np.pad(whole[name], [(0, 0), (0, columns)]) for name in ("mask", "segment_ids")}
            loss, grads = self._objective(self._rounded(whole, "float64")[0], objective)
            other, wide = self._objective(self._rounded(padded, "float64")[0], objective)
            assert_close(np.array([other]), np.array([loss]), 1e-13)
            assert_close(wide[0], np.pad(grads[0], [(0, 0), (0, columns)]), 1e-13)

    def test_ratio_one_gives_the_reinforce_gradient(self) -> None:
        """At pi_theta = pi_prox = pi_behave the surrogate's gradient is -weight * A, whatever the clips."""
        with self.precision("float64"):
            case = inputs("ordinary", 5)
            case |= {"proximal_logp": case["logp"], "behavior_logp": case["logp"]}
            ours, exact = self._rounded(case, "float64")
            expected = np.where(exact["mask"], -exact["weight"] * exact["advantage"], 0)
            for objective in (Objective(dual_clip=2.0, weight_cap=1.5), Objective(loss="cispo")):
                assert_close(self._objective(ours, objective)[1][0], expected, 1e-14)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("objective", OBJECTIVES[:-1], ids=lambda o: f"{o.loss}-{o.ratio_level}-{o.proximal}-{o.cap_level}")
    def test_unit_ratio_is_exact_with_no_step_taken(self, objective: Objective, dtype: str) -> None:
        """The proximal policy is the current one, by its own log-probs or given the same numbers."""
        objective = dataclasses.replace(objective, proximal="recomputed")
        with self.precision(dtype):
            ours, exact = self._rounded(inputs("ordinary", 6), dtype)
            for proximal in (None, ours["logp"]):
                _, metrics = type(self).policy_objective(
                    ours["logp"], ours["entropy"], _tokens(ours)._replace(proximal_logp=proximal), objective
                )
                weight = metrics[f"{PREFIX}/importance_weight"]
                assert self.numpy(weight.min) == self.numpy(weight.max) == 1
                assert self.numpy(weight.sum) == self.numpy(weight.count) == exact["mask"].sum()
                assert self.numpy(metrics[f"{PREFIX}/clip_ratio"].sum) == 0
                assert self.numpy(metrics[f"{PREFIX}/approx_kl"].sum) == 0

    def test_metrics_are_unweighted_moments_of_the_trained_tokens(self) -> None:
        with self.precision("float64"):
            ours, exact = self._rounded(inputs("stale", 7), "float64")
            _, metrics = type(self).policy_objective(ours["logp"], ours["entropy"], _tokens(ours), BY_TOKEN)
            mask = exact["mask"]
            exact = {name: array[mask] for name, array in exact.items()}
            ratio = np.exp(exact["logp"] - exact["proximal_logp"])
            behave = np.exp(exact["proximal_logp"] - exact["behavior_logp"])
            cut = np.where(exact["advantage"] >= 0, ratio > 1.28, (ratio < 0.8) | (ratio > 3))
            for name, x in (
                ("importance_weight", ratio),
                ("behave_imp_weight", behave),
                ("clip_ratio", cut),
                ("behave_cap_ratio", behave > 2.0),
                ("entropy", exact["entropy"]),
                ("approx_kl", ratio - 1 - np.log(ratio)),
            ):
                mean = metrics[f"{PREFIX}/{name}"]
                assert self.numpy(mean.count) == mask.sum()
                np.testing.assert_allclose(self.numpy(mean.sum), x.sum(), rtol=1e-11, err_msg=name)
                if np.isfinite(self.numpy(mean.min)):
                    np.testing.assert_allclose((self.numpy(mean.min), self.numpy(mean.max)), (x.min(), x.max()), rtol=1e-12)

    def test_the_shortcuts_error_is_measured_where_both_are_known(self) -> None:
        with self.precision("float64"):
            ours, exact = self._rounded(inputs("stale", 8), "float64")
            _, metrics = type(self).policy_objective(
                ours["logp"], ours["entropy"], _tokens(ours), Objective(proximal="interpolated")
            )
            exact = {name: array[exact["mask"]] for name, array in exact.items()}
            behave = exact["behavior_logp"]
            guess = behave + exact["interpolation"] * (exact["logp"] - behave)
            expected = np.abs(guess - exact["proximal_logp"])
            error = metrics[f"{PREFIX}/proximal_error"]
            np.testing.assert_allclose(self.numpy(error.sum), expected.sum(), rtol=1e-12)
            np.testing.assert_allclose(self.numpy(error.max), expected.max(), rtol=1e-12)

    def test_nothing_to_train_gives_zeros_and_empty_means(self) -> None:
        with self.precision("float32"):
            ours, _ = self._rounded(inputs("all_masked"), "float32")
            loss, grads = self._objective(ours, BY_TOKEN)
            assert loss == 0 and not grads[0].any() and not grads[1].any()
            _, metrics = type(self).policy_objective(ours["logp"], ours["entropy"], _tokens(ours), BY_TOKEN)
            assert all(self.numpy(mean.count) == 0 and self.numpy(mean.sum) == 0 for mean in metrics.values())

    def test_masked_overflow_of_a_log_ratio_of_89_is_finite(self) -> None:
        with self.precision("float32"):
            case = _masked(inputs("ordinary", 9), np.arange(R * M).reshape(R, M) % 2 == 0)
            case["logp"] = np.where(case["mask"], case["logp"], 89.0)
            others = ("proximal_logp", "behavior_logp", "reference_logp", "teacher_logp")
            case |= {name: np.where(case["mask"], case[name], 0.0) for name in others}
            for objective in OBJECTIVES:
                loss, grads = self._objective(self._rounded(case, "float32")[0], objective)
                assert np.isfinite(loss) and np.isfinite(grads[0]).all()
                assert not grads[0][~case["mask"]].any()

    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    def test_reverse_kl_gradient_of_kl_in_the_loss(self, estimator: str) -> None:
        """In expectation over samples: every token of the vocabulary once, weighted by its probability."""
        logits, reference = np.array([0.3, -0.2, 0.5]), np.array([0.0, 0.1, -0.1])
        log_p, log_q = (z - np.log(np.exp(z).sum()) for z in (logits, reference))
        p = np.exp(log_p)
        reverse = p * (log_p - log_q - np.sum(p * (log_p - log_q)))
        np.testing.assert_allclose(reverse, [-0.000313, -0.128877, 0.129190], atol=1e-6)
        with self.precision("float64"):
            one = [self.array(x[None], "float64") for x in (log_p, log_q, np.ones(3), np.ones(3, bool), p)]
            loss = functools.partial(self._kl, estimator=estimator)
            d_logp = self.numpy(self.gradient(loss, one[:1], *one[1:])[1][0])[0]
        np.testing.assert_allclose(d_logp - p * d_logp.sum(), reverse, atol=1e-14)  # through log-softmax

    def test_explained_variance_comes_from_merged_moments(self) -> None:
        from rljax.metrics.mean import Mean, merge
        from rljax.objective.explained_variance import explained_variance

        with self.precision("float64"):
            parts, values, returns = [], [], []
            for seed in range(2):
                ours, exact = self._rounded(inputs("ordinary", seed), "float64")
                arguments = [ours[name] for name in ("values", "proximal_values", "returns", "weight", "mask")]
                _, metrics = type(self).value_objective(*arguments, clip=0.2)
                parts.append({name: Mean(*(float(self.numpy(x)) for x in mean)) for name, mean in metrics.items()})
                values.append(exact["values"][exact["mask"]])
                returns.append(exact["returns"][exact["mask"]])
            values, returns = np.concatenate(values), np.concatenate(returns)
            expected = 1 - np.var(returns - values) / np.var(returns)
            assert abs(explained_variance(merge(parts)).value - expected) < 1e-10

    # The log-prob op

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows, chunk, softcap", [(13, 4, None), (13, 4, 4.0), (1, 4, None), (0, 4, None), (8, 100, None)])
    def test_logprobs_equal_the_oracle(self, rows: int, chunk: int, softcap: float | None, dtype: str) -> None:
        bounds = {"float64": (1e-13, 1e-12), "float32": (2e-6, 1e-5), "bfloat16": (2e-6, 2**-7)}[dtype]
        with self.precision(dtype):
            ours, exact = self._scoring_case(rows, dtype)
            static = dict(temperature=0.6, softcap=softcap)
            logp, entropy = type(self).token_logprobs(*ours[:3], **static, chunk=chunk)
            expected = logprob_oracle.token_logprobs(*exact[:3], **static)
            assert_close(self.numpy(logp), expected[0], bounds[0], floor=1.0)
            assert_close(self.numpy(entropy), expected[1], bounds[0], floor=1.0)

            def weighted(hidden: Any, unembedding: Any, labels: Any, d_logp: Any, d_entropy: Any) -> Any:
                logp, entropy = type(self).token_logprobs(hidden, unembedding, labels, **static, chunk=chunk)
                return (logp * d_logp).sum() + (entropy * d_entropy).sum()

            _, grads = self.gradient(weighted, ours[:2], *ours[2:])
            for grad, derived in zip(grads, logprob_oracle.token_logprobs_grad(*exact, **static), strict=True):
                assert_close(self.numpy(grad), derived, bounds[1])

    def test_sampling_temperature_divides_the_logits(self) -> None:
        with self.precision("float64"):
            logits = np.array([[2.0, 0.0, -1.0]])
            arrays = [self.array(x, "float64") for x in (logits, np.eye(3), np.array([0]))]
            for temperature, expected in ((0.6, -0.041537), (1.0, -0.169846)):
                logp = self.numpy(type(self).token_logprobs(*arrays, temperature=temperature)[0])[0]
                z = logits[0] / temperature
                assert abs(logp - (z[0] - np.log(np.exp(z).sum()))) < 1e-14
                assert abs(logp - expected) < 1e-6

    @pytest.mark.parametrize("chunk", [1, 5, 12])
    def test_any_chunk_gives_the_same(self, chunk: int) -> None:
        with self.precision("float64"):
            ours, exact = self._scoring_case(13, "float64")
            logp, entropy = type(self).token_logprobs(*ours[:3], chunk=chunk)
            expected = logprob_oracle.token_logprobs(*exact[:3])
            assert_close(self.numpy(logp), expected[0], 1e-13)
            assert_close(self.numpy(entropy), expected[1], 1e-13)

    @pytest.mark.parametrize(
        "objective, softcap, dtype",
        [(objective, None, "float64") for objective in OBJECTIVES if objective.by_token]
        + [(BY_TOKEN, 4.0, dtype) for dtype in DTYPES],
        ids=lambda x: f"{x.loss}-{x.proximal}" if isinstance(x, Objective) else str(x),
    )
    def test_fused_equals_the_oracle(self, objective: Objective, softcap: float | None, dtype: str) -> None:
        if type(self).fused_objective is None:
            pytest.skip("this backend has no fused objective")
        static = dict(temperature=0.8, softcap=softcap)
        with self.precision(dtype):
            case = self._rounded(inputs("stale", 10), dtype)
            ours, exact = self._scoring_case(R * M, dtype)
            logp, entropy = logprob_oracle.token_logprobs(*exact[:3], **static)
            expected = objective_oracle.policy_objective(logp.reshape(R, M), entropy.reshape(R, M), _tokens(case[1]), objective)
            slopes = expected.d_logp.ravel(), expected.d_entropy.ravel()
            derived = logprob_oracle.token_logprobs_grad(*exact[:3], *slopes, **static)

            def fused(hidden: Any, unembedding: Any) -> Any:
                return type(self).fused_objective(hidden, unembedding, ours[2], _tokens(case[0]), objective, **static, chunk=7)[
                    0
                ]

            loss, grads = self.gradient(fused, ours[:2])
            assert abs(self.numpy(loss) - expected.loss) <= VALUE[dtype] * (1 + 100 * abs(expected.loss))
            for grad, exactly in zip(grads, derived, strict=True):
                assert_close(self.numpy(grad), exactly, {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2}[dtype])

    def test_fused_metrics_are_the_objectives(self) -> None:
        if type(self).fused_objective is None:
            pytest.skip("this backend has no fused objective")
        with self.precision("float64"):
            tokens = _tokens(self._rounded(inputs("stale", 11), "float64")[0])
            ours, _ = self._scoring_case(R * M, "float64")
            logp, entropy = type(self).token_logprobs(*ours[:3])
            _, expected = type(self).policy_objective(logp.reshape(R, M), entropy.reshape(R, M), tokens, BY_TOKEN)
            _, metrics = type(self).fused_objective(*ours[:3], tokens, BY_TOKEN, chunk=5)
            assert metrics.keys() == expected.keys()
            for name, mean in metrics.items():
                np.testing.assert_allclose(
                    [self.numpy(x) for x in mean], [self.numpy(x) for x in expected[name]], rtol=1e-11, err_msg=name
                )

    def test_a_sequence_level_objective_is_not_fused(self) -> None:
        if type(self).fused_objective is None:
            pytest.skip("this backend has no fused objective")
        ours, _ = self._scoring_case(R * M, "float32")
        tokens = _tokens(self._rounded(inputs("ordinary"), "float32")[0])
        with pytest.raises(ValueError, match="sequence-level"):
            type(self).fused_objective(*ours[:3], tokens, Objective(ratio_level="sequence"))

    # Helpers

    def _rounded(self, case: dict[str, np.ndarray], dtype: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The backend's arrays, and what they hold after rounding, for the oracle."""
        ours = {name: self.array(array, dtype) for name, array in case.items()}
        return ours, {name: self.numpy(array) for name, array in ours.items()}

    def _scoring_case(self, rows: int, dtype: str) -> tuple[list[Any], list[np.ndarray]]:
        """hidden, unembedding, labels, d_logp, d_entropy: 300 words, 16 dimensions."""
        random = np.random.default_rng(rows)
        arrays = [random.normal(size=(rows, 16)), random.normal(size=(300, 16)) * 0.5, random.integers(0, 300, rows)]
        arrays += [random.normal(size=rows), random.normal(size=rows)]
        ours = [self.array(x, dtype) for x in arrays]
        return ours, [self.numpy(x) for x in ours]

    def _term_of(self, name: str, static: tuple[Any, ...], arguments: tuple[str, ...], wrt: tuple[str, ...]) -> Any:
        """A function of the differentiable arguments, then the others; one object for each combination, for jit's sake."""
        key = (type(self), name, static, wrt)
        if key not in _FUNCTIONS:
            kernel = getattr(self.losses, name)

            def function(*values: Any) -> Any:
                by_name = dict(zip(list(wrt) + [a for a in arguments if a not in wrt], values, strict=True))
                return kernel(*(by_name[a] for a in arguments), **dict(static)).sum

            _FUNCTIONS[key] = function
        return _FUNCTIONS[key]

    def _objective(self, ours: dict[str, Any], objective: Objective) -> tuple[float, list[np.ndarray]]:
        def loss(logp: Any, entropy: Any, tokens: TokenArrays) -> Any:
            return type(self).policy_objective(logp, entropy, tokens, objective)[0]

        key = (type(self), objective)
        function = _FUNCTIONS.setdefault(key, loss)
        total, grads = self.gradient(function, [ours["logp"], ours["entropy"]], _tokens(ours))
        return float(self.numpy(total)), [self.numpy(grad) for grad in grads]

    def _kl(self, *arrays: Any, estimator: str) -> Any:
        return self.losses.kl_loss(*arrays, estimator=estimator).sum


_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def assert_close(ours: np.ndarray, exact: np.ndarray, tolerance: float, floor: float = 0.0) -> None:
    """Largest difference at most tolerance times the largest entry (and at least floor)."""
    assert ours.shape == exact.shape
    assert np.isfinite(ours).all()
    if exact.size:
        assert np.abs(ours - exact).max() <= tolerance * max(np.abs(exact).max(), floor)


def _masked(case: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    """The case with another mask; what a token of it holds that was masked before is made finite."""
    finite = {
        name: np.where(np.isfinite(x) & (np.abs(x) < 50), x, 0.5) if x.dtype.kind == "f" else x for name, x in case.items()
    }
    return finite | {"mask": mask, "segment_ids": np.where(mask, np.maximum(case["segment_ids"], 1), 0)}


def _tokens(arrays: dict[str, Any]) -> TokenArrays:
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
