"""Parity of log-probs from hidden states, by themselves and fused with the objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rljax.objective import logprobs as logprob_oracle
from rljax.objective import oracle as objective_oracle
from rljax.objective.spec import Objective
from rljax.testing.parity_backend import BY_TOKEN, DTYPES, OBJECTIVES, VALUE, Backend, assert_close, tokens_of
from rljax.testing.parity_cases import M, R, inputs


class LogprobSuite(Backend):
    """Tests of log-probs, entropy, their gradients and the fused objective against the oracle."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rows, chunk, softcap", [(13, 4, None), (13, 4, 4.0), (1, 4, None), (0, 4, None), (8, 100, None)])
    def test_logprobs_equal_the_oracle(self, rows: int, chunk: int, softcap: float | None, dtype: str) -> None:
        bounds = {"float64": (1e-13, 1e-12), "float32": (2e-6, 1e-5), "bfloat16": (2e-6, 2**-7)}[dtype]
        with self.precision(dtype):
            ours, exact = self._scoring_case(rows, dtype)
            static: dict[str, Any] = dict(temperature=0.6, softcap=softcap)
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
        fused_objective, static = self._fused(), dict[str, Any](temperature=0.8, softcap=softcap)
        with self.precision(dtype):
            case = self._rounded(inputs("stale", 10), dtype)
            ours, exact = self._scoring_case(R * M, dtype)
            logp, entropy = logprob_oracle.token_logprobs(*exact[:3], **static)
            tokens, rows, entropies = tokens_of(case[0]), logp.reshape(R, M), entropy.reshape(R, M)
            expected = objective_oracle.policy_objective(rows, entropies, tokens_of(case[1]), objective)
            slopes = expected.d_logp.ravel(), expected.d_entropy.ravel()
            hidden, unembedding, labels = exact[:3]
            derived = logprob_oracle.token_logprobs_grad(hidden, unembedding, labels, *slopes, **static)

            def fused(hidden: Any, unembedding: Any) -> Any:
                return fused_objective(hidden, unembedding, ours[2], tokens, objective, **static, chunk=7)[0]

            loss, grads = self.gradient(fused, ours[:2])
            assert abs(self.numpy(loss) - expected.loss) <= VALUE[dtype] * (1 + 100 * abs(expected.loss))
            for grad, exactly in zip(grads, derived, strict=True):
                assert_close(self.numpy(grad), exactly, {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2}[dtype])

    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    def test_fused_with_tokens_of_advantage_0_equals_the_oracle(self, share: float) -> None:
        """Tokens without a gradient take another way, in whichever order they come."""
        fused_objective = self._fused()
        with self.precision("float64"):
            random, objective = np.random.default_rng(3), dataclasses.replace(BY_TOKEN, kl_coef=0.0, entropy_coef=0.0)
            case = inputs("stale", 12)
            case["advantage"] = np.where(random.random((R, M)) < share, 0.0, case["advantage"])
            tokens, expecting = (tokens_of(arrays) for arrays in self._rounded(case, "float64"))
            ours, exact = self._scoring_case(R * M, "float64")
            logp, entropy = logprob_oracle.token_logprobs(*exact[:3])
            expected = objective_oracle.policy_objective(logp.reshape(R, M), entropy.reshape(R, M), expecting, objective)
            hidden, unembedding, labels = exact[:3]
            slopes = expected.d_logp.ravel(), expected.d_entropy.ravel()
            derived = logprob_oracle.token_logprobs_grad(hidden, unembedding, labels, *slopes)

            def fused(hidden: Any, unembedding: Any) -> Any:
                return fused_objective(hidden, unembedding, ours[2], tokens, objective, chunk=5)[0]

            loss, grads = self.gradient(fused, ours[:2])
            np.testing.assert_allclose(self.numpy(loss), expected.loss, rtol=1e-11, atol=1e-13)
            for grad, exactly in zip(grads, derived, strict=True):
                assert_close(self.numpy(grad), exactly, 1e-12)
            _, metrics = fused_objective(*ours[:3], tokens, objective, chunk=5)
            active = expecting.mask & (expecting.advantage != 0)
            assert self.numpy(metrics["ppo_actor/with_advantage/share"].sum) == np.count_nonzero(active)

    def test_fused_metrics_are_the_objectives(self) -> None:
        fused_objective = self._fused()
        with self.precision("float64"):
            tokens = tokens_of(self._rounded(inputs("stale", 11), "float64")[0])
            ours, _ = self._scoring_case(R * M, "float64")
            logp, entropy = type(self).token_logprobs(*ours[:3])
            _, expected = type(self).policy_objective(logp.reshape(R, M), entropy.reshape(R, M), tokens, BY_TOKEN)
            _, metrics = fused_objective(*ours[:3], tokens, BY_TOKEN, chunk=5)
            assert metrics.keys() == expected.keys()
            for name, mean in metrics.items():
                np.testing.assert_allclose(
                    [self.numpy(x) for x in mean], [self.numpy(x) for x in expected[name]], rtol=1e-11, err_msg=name
                )

    def test_a_sequence_level_objective_is_not_fused(self) -> None:
        fused_objective = self._fused()
        ours, _ = self._scoring_case(R * M, "float32")
        tokens = tokens_of(self._rounded(inputs("ordinary"), "float32")[0])
        with pytest.raises(ValueError, match="sequence-level"):
            fused_objective(*ours[:3], tokens, Objective(ratio_level="sequence"))

    # Helpers

    def _fused(self) -> Callable[..., Any]:
        """Returns the backend's fused objective. Skips the test if it has none."""
        function = type(self).fused_objective
        if function is None:
            pytest.skip("this backend has no fused objective")
        return function

    def _scoring_case(self, rows: int, dtype: str) -> tuple[list[Any], list[np.ndarray]]:
        """Draws hidden, unembedding, labels, d_logp and d_entropy: 300 tokens, 16 dimensions."""
        random = np.random.default_rng(rows)
        arrays = [random.normal(size=(rows, 16)), random.normal(size=(300, 16)) * 0.5, random.integers(0, 300, rows)]
        arrays += [random.normal(size=rows), random.normal(size=rows)]
        ours = [self.array(x, dtype) for x in arrays]
        return ours, [self.numpy(x) for x in ours]
