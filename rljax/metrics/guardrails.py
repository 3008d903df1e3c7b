"""Guardrails: bounds on a step's metrics that end a run which has gone wrong, before it spends
another day.

A bound that is exceeded `guard.patience` steps in a row ends the run, and so does one step that is
far out. From the first of those steps on no ordinary checkpoint is made (`suspect`): the one that
a later run goes on from is from before it all began.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from rljax.config.schema import GuardConfig
from rljax.errors import GuardrailError
from rljax.metrics.mean import Mean


class Guard(NamedTuple):
    """One key of `guard`."""

    key: str
    metric: str
    most: bool  # the value is the most that is allowed; else the least
    remedy: str
    far: float = math.inf  # times beyond the bound that end a run in one step: no healthy one comes back from there

    def within(self, value: float, bound: float) -> bool:
        """NaN is not."""
        return value <= bound if self.most else value >= bound


UPDATE = "ppo_actor/update"
ADVANTAGE = "ppo_actor/advantage"
DISAGREE = "sampler and learner disagree: lower rollout.max_head_offpolicyness, compare their dtypes, run `rljax parity`"
GUARDS = (
    Guard(
        "max_approx_kl",
        f"{UPDATE}/approx_kl",
        True,
        "lower actor.optimizer.lr or actor.eps_clip, fewer actor.ppo_n_minibatches",
        far=100.0,
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
    Guard("max_behave_imp_weight", f"{UPDATE}/behave_imp_weight", True, DISAGREE, far=100.0),
    Guard("min_behave_imp_weight", f"{UPDATE}/behave_imp_weight", False, DISAGREE, far=100.0),
    Guard(
        "max_no_eos_ratio",
        "ppo_actor/no_eos_ratio",
        True,
        "raise gconfig.max_new_tokens, or actor.mask_no_eos, or actor.overlong_reward_penalty",
    ),
)
NUMBERS = ("loss", "grad_norm")  # of an update: finite, or something is broken
IDLE = 5  # steps in a row that teach nothing, until it is said
NOT_FINITE = "lower actor.optimizer.lr, set gradient_clipping, compute in float32, look at the batch in samples.jsonl"


class Guardrails:
    """Counts steps out of bounds.

    Example:

        guardrails = Guardrails(config.guard)
        guardrails.check(metrics)          # each step; raises GuardrailError
        guardrails.suspect                 # "" while all is well
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._bad: dict[str, int] = {}  # key -> steps in a row
        self._lines: dict[str, str] = {}  # of those
        self._idle = 0  # steps in a row in which there was nothing to learn

    @property
    def suspect(self) -> str:
        """What is out of bounds now, in a line; empty when nothing is."""
        return next(iter(self._lines.values()), "")

    def check(self, metrics: Mapping[str, Mean]) -> None:
        """A step's. A metric that it does not have says nothing. Raises GuardrailError."""
        if self._config.finite:
            self._count("finite", *_finite(metrics), NOT_FINITE)
        for guard in GUARDS:
            bound: float | None = getattr(self._config, guard.key)
            mean = metrics.get(guard.metric)
            if bound is None or mean is None or not mean.count:
                continue
            bad = not guard.within(mean.value, bound)
            edge = bound * guard.far if guard.most else bound / guard.far
            far = bad and not math.isnan(mean.value) and not guard.within(mean.value, edge)
            line = f"{guard.metric} is {mean.value:.4g}, {'far ' if far else ''}{'above' if guard.most else 'below'} {bound:g}"
            self._count(guard.key, bad, line, guard.remedy, far)

    def at_the_end(self) -> None:
        """A run does not end well on numbers that are none, however few the steps.

        Raises GuardrailError.
        """
        if "finite" in self._lines:
            raise GuardrailError(f"guard.finite: {self._lines['finite']} ({NOT_FINITE})")

    def hint(self, metrics: Mapping[str, Mean]) -> str:
        """What is no fault of the numbers and yet will come to nothing, in a line, once; else
        empty.
        """
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

    def _count(self, key: str, bad: bool, line: str, remedy: str, at_once: bool = False) -> None:
        if not bad:
            self._bad.pop(key, None)
            self._lines.pop(key, None)
            return
        self._bad[key] = self._bad.get(key, 0) + 1
        self._lines[key] = line
        if at_once or self._bad[key] >= self._config.patience:
            steps = f"{self._bad[key]} steps in a row" if self._bad[key] > 1 else "one step"
            raise GuardrailError(f"guard.{key}: {line}, for {steps} ({remedy})")


def _finite(metrics: Mapping[str, Mean]) -> tuple[bool, str]:
    """(whether a loss or a gradient is not finite, which).

    Learners skip such an update and count it.
    """
    for name, mean in metrics.items():
        last = name.rpartition("/")[2]
        if last == "skipped" and mean.sum > 0:
            return True, f"{name} is {mean.value:g}: a gradient that is not finite was not applied"
        if last in NUMBERS and name.count("/") and mean.count and not math.isfinite(mean.sum):
            return True, f"{name} is {mean.value}"
    return False, ""
