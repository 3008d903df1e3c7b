"""Guardrails: bounds on a step's metrics, and the actions that follow when one is broken.

A metric out of bounds for `guard.patience` steps in a row leads to the bound's action (`check`); so
does a single step far out of bounds. From the first such step on no ordinary checkpoint is made
(`suspect`), so that a later run resumes from before the trouble began. Actions within an update,
`skip` and `stop_epoch`, are taken by the learner and the training step (`update_bounds`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rljax.config.schema import GuardConfig
from rljax.config.schema.guard import ACTIONS, OF_UPDATE, UPDATE_ACTIONS
from rljax.metrics.mean import Mean


class Guard(NamedTuple):
    """Bound on one metric."""

    key: str  # of the `guard` section, whose value is the bound
    metric: str
    is_maximum: bool  # else the bound is a minimum
    remedy: str
    fatal_factor: float = math.inf  # a value beyond the bound by this factor is enough in one step

    def within(self, value: float, bound: float) -> bool:
        """Returns whether a value is within the bound; False for NaN."""
        return value <= bound if self.is_maximum else value >= bound


UPDATE = "ppo_actor/update"
REWARD = "rollout/reward"
ADVANTAGE = "ppo_actor/advantage"
GRAD_NORM = f"{UPDATE}/grad_norm"
OUT_OF_BOUNDS = f"{UPDATE}/out_of_bounds"  # share of the updates that a learner skipped for a bound
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
        GRAD_NORM,
        True,
        "lower actor.optimizer.lr or gradient_clipping, look at the rewards' scale",
    ),
    Guard("min_reward", REWARD, False, "look at samples.jsonl: the reward, the prompts, the learning rate"),
    Guard("max_behave_imp_weight", f"{UPDATE}/behave_imp_weight", True, DISAGREE, fatal_factor=100.0),
    Guard("min_behave_imp_weight", f"{UPDATE}/behave_imp_weight", False, DISAGREE, fatal_factor=100.0),
    Guard(
        "max_no_eos_ratio",
        "ppo_actor/no_eos_ratio",
        True,
        "raise gconfig.max_new_tokens, or actor.mask_no_eos, or actor.overlong_reward_penalty",
    ),
    Guard(
        "max_parity_excess",
        "parity/excess",
        True,
        "the two paths disagree on a batch: run `rljax parity` on this config; one of them is wrong",
        fatal_factor=10.0,
    ),
)
MUST_BE_FINITE = ("loss", "grad_norm")  # last parts of metric names
CHANCE = 1e-3  # probability below which a fall of the reward is not put down to chance
IDLE = 5  # steps in a row without anything to learn before a warning
NOT_FINITE = "lower actor.optimizer.lr, set gradient_clipping, compute in float32, look at the batch in samples.jsonl"
COLLAPSED = "the policy has collapsed, or the reward has failed: look at samples.jsonl and entropy; lower actor.optimizer.lr"
NO_GRADIENT = "the policy is saturated, or the cap on behavior weights masks every token: lower actor.optimizer.lr"


@dataclasses.dataclass(frozen=True)
class UpdateBound:
    """Bound that is known within an update, before its optimizer step."""

    guard: Guard
    bound: float
    action: str  # one of UPDATE_ACTIONS

    def broken(self, metrics: Mapping[str, Mean]) -> bool:
        """Returns whether the metrics of an update break the bound. Metrics that are missing don't."""
        mean = metrics.get(self.guard.metric)
        return mean is not None and bool(mean.count) and not self.guard.within(mean.value, self.bound)


def update_bounds(config: GuardConfig, *actions: str) -> tuple[UpdateBound, ...]:
    """Returns the bounds with one of these actions, of UPDATE_ACTIONS."""
    found = []
    for guard in GUARDS:
        bound, action = getattr(config, guard.key), config.action_of(guard.key)
        if config.enabled and bound is not None and guard.key in OF_UPDATE and action in actions:
            found.append(UpdateBound(guard, bound, action))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Event:
    """An action of a guardrail: one line of guard.jsonl."""

    step: int
    guard: str  # the key of a bound, or the id of a rule
    metric: str
    value: float
    bound: float | None
    action: str
    detail: str
    restored: int | None = None  # step whose checkpoint a rollback restored; later ones up to `step` were undone

    def __str__(self) -> str:
        bound = "" if self.bound is None else f", bound {self.bound:g}"
        return f"guard.{self.guard}: {self.metric} {self.value:.4g}{bound}: {self.action}"


@dataclasses.dataclass(frozen=True)
class Breach:
    """A bound that was broken for long enough, or a rule's finding: an action is due."""

    guard: str  # the key of a bound, or the id of a rule
    metric: str
    value: float
    bound: float | None
    action: str
    since: int  # first step of the evidence
    line: str  # what was found
    remedy: str

    def event(self, step: int, action: str, detail: str, restored: int | None = None) -> Event:
        """Returns the line of guard.jsonl for the action that was taken."""
        return Event(step, self.guard, self.metric, self.value, self.bound, action, detail, restored)


class Guardrails:
    """Counter of consecutive steps out of bounds.

    Args:
      group_size: completions per prompt; their rewards are not independent.

    Example:

        guardrails = Guardrails(config.guard, config.gconfig.n_samples)
        for breach in guardrails.check(step, metrics):  # each step; the most severe action first
            ...
        guardrails.suspect                              # "" while all is well
    """

    def __init__(self, config: GuardConfig, group_size: int = 1) -> None:
        self._config, self._group_size = config, group_size
        self._best = Mean(0.0, 0)  # reward of the step with the best mean so far
        self._least, self._most = math.inf, -math.inf  # of any completion's reward so far
        self._rewarded = 0  # steps with a reward so far
        self.reset()

    def reset(self) -> None:
        """Forgets the steps in a row so far."""
        self._since: dict[str, int] = {}  # first step out of bounds of those in a row, by key
        self._bad: dict[str, int] = {}  # steps in a row out of bounds, by key
        self._lines: dict[str, str] = {}  # descriptions of those, by key
        self._low = Mean(0.0, 0)  # reward of the steps in a row that may be a collapse
        self._idle = 0  # steps in a row in which there was nothing to learn

    @property
    def suspect(self) -> str:
        """One line about a metric that is out of bounds now; "" if none is."""
        return next(iter(self._lines.values()), "")

    def check(self, step: int, metrics: Mapping[str, Mean]) -> list[Breach]:
        """Checks a step's metrics and returns what calls for an action, the most severe first.

        Metrics that are missing pass. An action is due again after `guard.patience` more steps.
        """
        if not self._config.enabled:
            return []
        due: list[Breach | None] = []
        if self._config.finite:
            due.append(self._count(step, "finite", *_find_not_finite(metrics), NOT_FINITE))
        if self._config.gradient:
            due.append(self._count(step, "gradient", *_find_no_gradient(metrics), NO_GRADIENT))
        if self._config.collapse:
            due.append(self._count(step, "collapse", *self._find_collapse(metrics), COLLAPSED))
        for guard in GUARDS:
            bound: float | None = getattr(self._config, guard.key)
            mean = metrics.get(guard.metric)
            within_update = self._config.action_of(guard.key) in UPDATE_ACTIONS
            if bound is None or mean is None or not mean.count or within_update:
                continue
            bad = not guard.within(mean.value, bound)
            fatal_bound = bound * guard.fatal_factor if guard.is_maximum else bound / guard.fatal_factor
            fatal = bad and not math.isnan(mean.value) and not guard.within(mean.value, fatal_bound)
            side = "above" if guard.is_maximum else "below"
            line = f"{guard.metric} is {mean.value:.4g}, {'far ' if fatal else ''}{side} {bound:g}"
            found = guard.metric if bad else ""
            due.append(self._count(step, guard.key, found, mean.value, line, guard.remedy, bound=bound, fatal=fatal))
        return in_order(breach for breach in due if breach is not None)

    def _find_collapse(self, metrics: Mapping[str, Mean]) -> tuple[str, float, str]:
        """Finds steps in a row with nothing to learn, at far less than the best reward.

        Half of the best is counted from the least reward of any completion so far. A fall that
        chance explains is none. Returns as `_find_not_finite`.
        """
        reward, advantage = metrics.get(REWARD), metrics.get(ADVANTAGE)
        if reward is None or not reward.count or math.isnan(reward.sum):
            return "", 0.0, ""
        self._rewarded += 1
        self._least = min(self._least, reward.min, reward.value)
        self._most = max(self._most, reward.max, reward.value)
        if not self._best.count or reward.value > self._best.value:
            self._best = reward
        half = (self._best.value + self._least) / 2
        if advantage is None or not advantage.min == advantage.max == 0 or reward.value >= half:
            self._low = Mean(0.0, 0)
            return "", 0.0, ""
        self._low += reward
        # Of many steps one is high and another one low by chance alone: hence a factor for the choice of both
        if self._rewarded**2 * self._probability_of_fall() >= CHANCE:
            return "", 0.0, ""
        line = f"{REWARD} is {reward.value:.4g} after {self._best.value:.4g}, and every advantage is 0"
        return REWARD, reward.value, line

    def _probability_of_fall(self) -> float:
        """Returns a bound on the probability of such a fall from the best step by chance.

        Chernoff's bound at equal expected rewards, at the expectation that makes it largest. It
        holds for any rewards within the range seen so far, and takes a group of completions as one
        draw.
        """
        if not self._least < self._most or not math.isfinite(self._most - self._least):
            return 1.0
        best, low = self._best, self._low
        pooled = self._share(best + low)
        exponent = sum(mean.count / self._group_size * _divergence(self._share(mean), pooled) for mean in (best, low))
        return math.exp(-exponent)

    def _share(self, reward: Mean) -> float:
        """Returns a mean reward's place in the range of rewards so far, from 0 to 1."""
        return min(max((reward.value - self._least) / (self._most - self._least), 0.0), 1.0)

    def check_end(self, step: int) -> Breach | None:
        """Returns a breach if the last loss or gradient norm was not finite, whatever the patience."""
        if "finite" not in self._lines:
            return None
        line = self._lines["finite"]
        return Breach("finite", "", math.nan, None, "stop", self._since.get("finite", step), line, NOT_FINITE)

    def hint(self, metrics: Mapping[str, Mean]) -> str:
        """Returns a warning, once, if nothing was learned for IDLE steps; else ""."""
        reward, advantage = metrics.get(REWARD), metrics.get(ADVANTAGE)
        constant = reward is not None and reward.count > 1 and reward.min == reward.max
        nothing = advantage is not None and advantage.min == advantage.max == 0
        self._idle = self._idle + 1 if constant or nothing else 0
        if self._idle != IDLE:
            return ""
        value = "" if reward is None else f"{reward.value:.4g}"
        found = f"every reward was {value}" if constant else f"the rewards of each group were equal (rollout/reward {value})"
        learned = "every advantage was 0, so that nothing was learned" if nothing else "no completion was told from another"
        return (
            f"{found} in the last {IDLE} steps, and {learned}; look at samples.jsonl: the task is solved, or too hard, "
            "or the reward does not tell completions apart"
        )

    @property
    def idle(self) -> bool:
        """True if there was nothing to learn in the last IDLE steps."""
        return self._idle >= IDLE

    def _count(
        self,
        step: int,
        key: str,
        metric: str,
        value: float,
        line: str,
        remedy: str,
        *,
        bound: float | None = None,
        fatal: bool = False,
    ) -> Breach | None:
        """Counts a step for one bound.

        Args:
          metric: the one that is out of bounds; empty if none is.
        """
        if not metric:
            for record in (self._bad, self._lines, self._since):
                record.pop(key, None)
            return None
        self._bad[key] = self._bad.get(key, 0) + 1
        self._lines[key] = line
        since = self._since.setdefault(key, step)
        if not fatal and self._bad[key] % self._config.patience:
            return None
        steps = f"{self._bad[key]} steps in a row" if self._bad[key] > 1 else "one step"
        return Breach(key, metric, value, bound, self._config.action_of(key), since, f"{line}, for {steps}", remedy)


def in_order(breaches: Iterable[Breach]) -> list[Breach]:
    """Sorts breaches, those with the most severe action first."""
    return sorted(breaches, key=lambda breach: -ACTIONS.index(breach.action))


def _divergence(p: float, q: float) -> float:
    """Returns the KL divergence, in nats, of two coins of probabilities p and q.

    q is 0 or 1 only where p is too.
    """
    return sum(a * math.log(a / b) for a, b in ((p, q), (1 - p, 1 - q)) if a > 0)


def _find_no_gradient(metrics: Mapping[str, Mean]) -> tuple[str, float, str]:
    """Finds a gradient of exactly 0 where advantages are not. Returns as `_find_not_finite`."""
    norm, advantage = metrics.get(GRAD_NORM), metrics.get(ADVANTAGE)
    if norm is None or not norm.count or norm.sum != 0 or advantage is None or advantage.min == advantage.max == 0:
        return "", 0.0, ""
    return GRAD_NORM, 0.0, f"{GRAD_NORM} is exactly 0, with advantages from {advantage.min:.4g} to {advantage.max:.4g}"


def _find_not_finite(metrics: Mapping[str, Mean]) -> tuple[str, float, str]:
    """Finds a loss or a gradient that is not finite. Returns metric ("" if none), value, line.

    Learners skip an update whose gradient is not finite, and count it as `skipped`.
    """
    for name, mean in metrics.items():
        last = name.rpartition("/")[2]
        if last == "skipped" and mean.sum > 0:
            return name, mean.value, f"{name} is {mean.value:g}: a gradient that is not finite was not applied"
        if last in MUST_BE_FINITE and name.count("/") and mean.count and not math.isfinite(mean.sum):
            return name, mean.value, f"{name} is {mean.value}"
    return "", 0.0, ""
