"""Guardrails: bounds on a step's metrics that end a run which has gone wrong.

A metric out of bounds for `guard.patience` steps in a row ends the run; so does a single step far
out of bounds. From the first such step on no ordinary checkpoint is made (`suspect`), so that a
later run resumes from before the trouble began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from rljax.config.schema import GuardConfig
from rljax.errors import GuardrailError
from rljax.metrics.mean import Mean


class Guard(NamedTuple):
    """Bound on one metric."""

    key: str  # of the `guard` section, whose value is the bound
    metric: str
    is_maximum: bool  # else the bound is a minimum
    remedy: str
    fatal_factor: float = math.inf  # a value beyond the bound by this factor ends the run in one step

    def within(self, value: float, bound: float) -> bool:
        """Returns whether a value is within the bound; False for NaN."""
        return value <= bound if self.is_maximum else value >= bound


UPDATE = "ppo_actor/update"
ADVANTAGE = "ppo_actor/advantage"
DISAGREE = "sampler and learner disagree: lower rollout.max_head_offpolicyness, compare their dtypes, run `rljax parity`"
GUARDS = (
    Guard(
        "max_approx_kl",
        f"{UPDATE}/approx_kl",
        True,
        "lower actor.optimizer.lr, actor.eps_clip or actor.ppo_n_minibatches",
        fatal_factor=100.0,
    ),
    Guard(
        "min_entropy", f"{UPDATE}/entropy", False, "raise actor.entropy_coef or gconfig.temperature, lower actor.optimizer.lr"
    ),
    Guard(
        "max_grad_norm",
        f"{UPDATE}/grad_norm",
        True,
        "lower actor.optimizer.lr or gradient_clipping, look at the rewards' scale",
    ),
    Guard("min_reward", "rollout/reward", False, "look at samples.jsonl: the reward, the prompts, the learning rate"),
    Guard("max_behave_imp_weight", f"{UPDATE}/behave_imp_weight", True, DISAGREE, fatal_factor=100.0),
    Guard("min_behave_imp_weight", f"{UPDATE}/behave_imp_weight", False, DISAGREE, fatal_factor=100.0),
    Guard(
        "max_no_eos_ratio",
        "ppo_actor/no_eos_ratio",
        True,
        "raise gconfig.max_new_tokens, or actor.mask_no_eos, or actor.overlong_reward_penalty",
    ),
)
MUST_BE_FINITE = ("loss", "grad_norm")  # last parts of metric names
IDLE = 5  # steps in a row without anything to learn before a warning
NOT_FINITE = "lower actor.optimizer.lr, set gradient_clipping, compute in float32, look at the batch in samples.jsonl"


class Guardrails:
    """Counter of consecutive steps out of bounds.

    Example:

        guardrails = Guardrails(config.guard)
        guardrails.check(metrics)          # each step; raises GuardrailError
        guardrails.suspect                 # "" while all is well
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._bad: dict[str, int] = {}  # steps in a row out of bounds, by key
        self._lines: dict[str, str] = {}  # descriptions of those, by key
        self._idle = 0  # steps in a row in which there was nothing to learn

    @property
    def suspect(self) -> str:
        """One line about a metric that is out of bounds now; "" if none is."""
        return next(iter(self._lines.values()), "")

    def check(self, metrics: Mapping[str, Mean]) -> None:
        """Checks a step's metrics. Metrics that are missing pass.

        Raises:
          GuardrailError: a metric was out of bounds for too long, or far out.
        """
        if self._config.finite:
            self._count("finite", *_find_not_finite(metrics), NOT_FINITE)
        for guard in GUARDS:
            bound: float | None = getattr(self._config, guard.key)
            mean = metrics.get(guard.metric)
            if bound is None or mean is None or not mean.count:
                continue
            bad = not guard.within(mean.value, bound)
            fatal_bound = bound * guard.fatal_factor if guard.is_maximum else bound / guard.fatal_factor
            fatal = bad and not math.isnan(mean.value) and not guard.within(mean.value, fatal_bound)
            side = "above" if guard.is_maximum else "below"
            line = f"{guard.metric} is {mean.value:.4g}, {'far ' if fatal else ''}{side} {bound:g}"
            self._count(guard.key, bad, line, guard.remedy, fatal)

    def check_end(self) -> None:
        """Fails the run if its last loss or gradient norm was not finite, whatever the patience.

        Raises:
          GuardrailError: a loss or a gradient norm of the last step was not finite.
        """
        if "finite" in self._lines:
            raise GuardrailError(f"guard.finite: {self._lines['finite']} ({NOT_FINITE})")

    def hint(self, metrics: Mapping[str, Mean]) -> str:
        """Returns a warning, once, if nothing was learned for IDLE steps; else ""."""
        advantage = metrics.get(ADVANTAGE)
        if advantage is None or not advantage.min == advantage.max == 0:
            self._idle = 0
            return ""
        self._idle += 1
        if self._idle != IDLE:
            return ""
        return (
            f"every advantage was 0 in the last {IDLE} steps, so that nothing was learned: the rewards of each group are equal "
            f"(rollout/reward {metrics['rollout/reward'].value:.4g}); look at samples.jsonl: the task is solved, or too hard, "
            "or the reward does not tell completions apart"
        )

    def _count(self, key: str, bad: bool, line: str, remedy: str, fatal: bool = False) -> None:
        if not bad:
            self._bad.pop(key, None)
            self._lines.pop(key, None)
            return
        self._bad[key] = self._bad.get(key, 0) + 1
        self._lines[key] = line
        if fatal or self._bad[key] >= self._config.patience:
            steps = f"{self._bad[key]} steps in a row" if self._bad[key] > 1 else "one step"
            raise GuardrailError(f"guard.{key}: {line}, for {steps} ({remedy})")


def _find_not_finite(metrics: Mapping[str, Mean]) -> tuple[bool, str]:
    """Returns whether a loss or a gradient is not finite, and a line that names it.

    Learners skip an update whose gradient is not finite, and count it as `skipped`.
    """
    for name, mean in metrics.items():
        last = name.rpartition("/")[2]
        if last == "skipped" and mean.sum > 0:
            return True, f"{name} is {mean.value:g}: a gradient that is not finite was not applied"
        if last in MUST_BE_FINITE and name.count("/") and mean.count and not math.isfinite(mean.sum):
            return True, f"{name} is {mean.value}"
    return False, ""
