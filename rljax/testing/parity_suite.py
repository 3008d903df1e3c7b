"""The parity suite: a backend's arithmetic equals the oracle's and keeps its invariants.

A backend subclasses `ParitySuite` and fills in what `Backend` leaves open; docs/parity.md shows
one. Expectations come from the float64 oracle, from identities, or from invariants. It needs
hypothesis beside pytest.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljax.metrics.mean import Mean, merge
from rljax.objective import losses as oracle
from rljax.objective import oracle as objective_oracle
from rljax.objective.explained_variance import explained_variance
from rljax.objective.spec import PREFIX, Objective, TokenArrays
from rljax.testing.parity_backend import BY_TOKEN, DTYPES, GRADIENT, OBJECTIVES, VALUE, assert_close, tokens_of
from rljax.testing.parity_cases import ARRAYS, KINDS, TERMS, M, R, inputs
from rljax.testing.parity_logprobs import LogprobSuite

# All backends share the test functions: hypothesis calls that differing executors; it is harmless without a database.
quick = settings(
    max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.differing_executors]
)
masks = st.lists(st.booleans(), min_size=R * M, max_size=R * M).map(lambda bits: np.array(bits).reshape(R, M))


class ParitySuite(LogprobSuite):
    """Subclass it as Test..., fill in what is abstract, and pytest does the rest."""

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
            expected = objective_oracle.policy_objective(exact["logp"], exact["entropy"], tokens_of(exact), objective)
            assert np.isfinite(loss)
            assert abs(loss - expected.loss) <= VALUE[dtype] * (1 + 100 * abs(expected.loss))
            assert_close(grads[0], expected.d_logp, GRADIENT[dtype])
            assert_close(grads[1], expected.d_entropy, GRADIENT[dtype])
            if dtype == "float64":
                _, metrics = type(self).policy_objective(ours["logp"], ours["entropy"], tokens_of(ours), objective)
                self._assert_same(metrics, expected.metrics)

    @quick
    @given(masks)
    def test_any_mask_gives_the_oracles_objective(self, mask: np.ndarray) -> None:
        with self.precision("float64"):
            ours, exact = self._rounded(_masked(inputs("stale", 1), mask), "float64")
            loss, grads = self._objective(ours, BY_TOKEN)
            expected = objective_oracle.policy_objective(exact["logp"], exact["entropy"], tokens_of(exact), BY_TOKEN)
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
        """Parts are any sets of tokens if the objective works by token, else any sets of rows."""
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
        """The surrogate's gradient is -weight * A on policy, whatever the clips.

        On policy means pi_theta = pi_prox = pi_behave.
        """
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
                    ours["logp"], ours["entropy"], tokens_of(ours)._replace(proximal_logp=proximal), objective
                )
                weight = metrics[f"{PREFIX}/importance_weight"]
                assert self.numpy(weight.min) == self.numpy(weight.max) == 1
                assert self.numpy(weight.sum) == self.numpy(weight.count) == exact["mask"].sum()
                assert self.numpy(metrics[f"{PREFIX}/clip_ratio"].sum) == 0
                assert self.numpy(metrics[f"{PREFIX}/approx_kl"].sum) == 0

    def test_metrics_are_unweighted_moments_of_the_trained_tokens(self) -> None:
        with self.precision("float64"):
            ours, exact = self._rounded(inputs("stale", 7), "float64")
            _, metrics = type(self).policy_objective(ours["logp"], ours["entropy"], tokens_of(ours), BY_TOKEN)
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

    def test_metrics_of_a_capped_sequence_are_those_of_the_sequence(self) -> None:
        """100 tokens of log-weight 0.05 are a weight of e^5: above the cap, so nothing is trained."""
        objective = Objective(weight_cap=5.0, cap_mode="mask", cap_level="sequence")
        case = _row(100, proximal_logp=0.05, advantage=1.0)
        assert not self._exact(case, objective).d_logp.any()
        found = self._found(case, objective)
        assert found["behave_cap_ratio"] == (1.0, 100.0) and found["applied_weight"] == (0.0, 100.0)
        np.testing.assert_allclose(found["behave_imp_weight"][0], np.exp(0.05), rtol=1e-12)  # of a token
        assert self._found(case, dataclasses.replace(objective, cap_level="token"))["behave_cap_ratio"] == (0.0, 100.0)

    def test_clip_ratio_is_of_what_the_loss_clipped(self) -> None:
        """CISPO clips either side whatever the sign of the advantage; PPO only against it."""
        case = _row(4, logp=np.log([3, 3, 0.3, 0.3]), advantage=np.array([-1.0, -1, 1, 1]))
        plain = Objective(clip_low=0.2, clip_high=0.28)
        for changes, share in (
            ({"loss": "cispo"}, 1),
            ({}, 0),
            ({"dual_clip": 2.0}, 0.5),
            ({"ratio_level": "sequence"}, 0),  # the geometric mean is 0.95: within the clip
        ):
            assert self._found(case, dataclasses.replace(plain, **changes))["clip_ratio"] == (share, 4.0), changes

    def test_metrics_are_over_all_trained_tokens_and_over_those_with_an_advantage(self) -> None:
        """A term that trains the others too moves no curve."""
        entropy = np.array([1.0, 2, 3, 6])
        case = _row(4, logp=np.log([1.0, 1, 2, 2]), entropy=entropy, advantage=np.array([0.5, -0.5, 0, 0]))
        plain, bonus = (self._found(case, Objective(entropy_coef=coef)) for coef in (0.0, 0.1))
        assert plain == bonus
        assert plain["entropy"] == (3.0, 4.0) and plain["with_advantage/entropy"] == (1.5, 2.0)
        np.testing.assert_allclose(plain["importance_weight"][0], 1.5, rtol=1e-12)
        assert plain["with_advantage/importance_weight"] == (1.0, 2.0) and plain["with_advantage/share"] == (0.5, 4.0)
        assert plain["clip_ratio"] == (0.0, 4.0)  # an advantage of 0 leaves nothing to clip

    def test_the_shortcuts_error_is_measured_where_both_are_known(self) -> None:
        with self.precision("float64"):
            ours, exact = self._rounded(inputs("stale", 8), "float64")
            _, metrics = type(self).policy_objective(
                ours["logp"], ours["entropy"], tokens_of(ours), Objective(proximal="interpolated")
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
            _, metrics = type(self).policy_objective(ours["logp"], ours["entropy"], tokens_of(ours), BY_TOKEN)
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
        """The expectation over samples sums over the vocabulary, weighted by probability."""
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
        with self.precision("float64"):
            parts: list[dict[str, Mean]] = []
            errors, targets = [], []
            for seed in range(2):
                ours, exact = self._rounded(inputs("ordinary", seed), "float64")
                arguments = [ours[name] for name in ("values", "proximal_values", "returns", "weight", "mask")]
                _, metrics = type(self).value_objective(*arguments, clip=0.2)
                parts.append({name: Mean(*(float(self.numpy(x)) for x in mean)) for name, mean in metrics.items()})
                errors.append(exact["returns"][exact["mask"]] - exact["values"][exact["mask"]])
                targets.append(exact["returns"][exact["mask"]])
            expected = 1 - np.var(np.concatenate(errors)) / np.var(np.concatenate(targets))
            assert abs(explained_variance(merge(parts)).value - expected) < 1e-10

    # Helpers

    def _term_of(self, name: str, static: tuple[Any, ...], arguments: tuple[str, ...], wrt: tuple[str, ...]) -> Any:
        """Returns a term as a function of the differentiable arguments, then the others.

        One object per combination, so that jit can reuse it.
        """
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
        total, grads = self.gradient(function, [ours["logp"], ours["entropy"]], tokens_of(ours))
        return float(self.numpy(total)), [self.numpy(grad) for grad in grads]

    def _found(self, case: dict[str, np.ndarray], objective: Objective) -> dict[str, tuple[float, float]]:
        """Returns (mean, tokens) of each metric by its short name; they are the oracle's."""
        with self.precision("float64"):
            ours, exact = self._rounded(case, "float64")
            _, metrics = type(self).policy_objective(ours["logp"], ours["entropy"], tokens_of(ours), objective)
            self._assert_same(metrics, self._exact(exact, objective).metrics)
            means = {name: [float(self.numpy(x)) for x in mean[:2]] for name, mean in metrics.items()}
            short = {name.removeprefix(f"{PREFIX}/").removeprefix("ppo_actor/"): mean for name, mean in means.items()}
            return {name: (total / count, count) for name, (total, count) in short.items()}

    def _exact(self, exact: dict[str, np.ndarray], objective: Objective) -> objective_oracle.LossAndGradient:
        return objective_oracle.policy_objective(exact["logp"], exact["entropy"], tokens_of(exact), objective)

    def _assert_same(self, metrics: dict[str, Any], expected: dict[str, Any]) -> None:
        """Asserts that all metrics are the oracle's: sums, counts, and where kept the extremes."""
        assert metrics.keys() == expected.keys()
        for name, mean in metrics.items():
            ours = np.array([float(self.numpy(x)) for x in mean])
            np.testing.assert_allclose(ours, np.array(expected[name]), rtol=1e-10, atol=1e-13, err_msg=name)

    def _kl(self, *arrays: Any, estimator: str) -> Any:
        return self.losses.kl_loss(*arrays, estimator=estimator).sum


_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def _row(length: int, **values: Any) -> dict[str, np.ndarray]:
    """Returns one row of one sequence; what is not given is 0, and a loss weight 1."""
    zeros = {name: np.zeros((1, length)) for name in inputs("ordinary")}
    given = {name: np.broadcast_to(np.asarray(value, np.float64), (1, length)) for name, value in values.items()}
    ones = np.ones((1, length))
    return zeros | {"weight": ones, "interpolation": ones, "mask": ones > 0, "segment_ids": ones.astype(np.int32)} | given


def _masked(case: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the case with another mask, and finite values for tokens that were masked before."""
    finite = {
        name: np.where(np.isfinite(x) & (np.abs(x) < 50), x, 0.5) if x.dtype.kind == "f" else x for name, x in case.items()
    }
    return finite | {"mask": mask, "segment_ids": np.where(mask, np.maximum(case["segment_ids"], 1), 0)}
