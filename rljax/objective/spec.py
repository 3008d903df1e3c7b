"""The objective of a policy update as one hashable value, and the arrays it is computed from.

    loss = sum over tokens of
        loss_weight * (w * surrogate(r, A) + kl_ctl * KL(reference)
                       + distill.coef * KL(teacher) - entropy_coef * H)

    r = pi_theta / pi_proximal            the ratio that is clipped
    w = pi_proximal / pi_behave           the decoupled weight, no gradient, capped

No framework is needed. `backends/<framework>/objective.py` computes it; `rljax/objective/losses.py`
is the float64 definition of every term.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from rljax.config.schema import ActorConfig, Config

PREFIX = "ppo_actor/update"  # prefix of the names of metrics over all trained tokens
ROUNDED_AWAY = f"{PREFIX}/rounded_away"
WITH_ADVANTAGE = "ppo_actor/with_advantage"  # of the same over those whose advantage is not 0


class TokenArrays(NamedTuple):
    """The trained tokens of R rows, m per row, as arrays of any framework.

    Index t of every array is about token t itself. Where `mask` is False every other array may hold
    anything, NaN included.
    """

    loss_weight: Any  # [R, m] float: aggregation and global normalizer (rljax/objective/aggregation.py)
    mask: Any  # [R, m] bool
    advantage: Any  # [R, m] float
    behavior_logp: Any  # [R, m] float, nats
    segment_ids: Any  # [R, m] int: 0 on padding, else in [1, m], local to a row
    proximal_logp: Any = None  # [R, m] float, nats; None: the current policy's own (ratio 1), or interpolated
    reference_logp: Any = None  # [R, m] float, nats; only with a KL term in the loss
    interpolation: Any = None  # [R, m] float in [0, 1], rljax/objective/proximal.py; only with prox_logp_method "loglinear"
    versions: Any = None  # [R, m] int
    teacher_logp: Any = None  # [R, m] float, nats; only with distillation


class MeanArrays(NamedTuple):
    """A `Mean` (rljax/metrics/mean.py) on the device: scalars of any framework.

    min is inf and max -inf if they are not kept.
    """

    sum: Any
    count: Any
    min: Any
    max: Any


@dataclasses.dataclass(frozen=True)
class Objective:
    """The policy objective. Hashable, so that a jitted function may take it as a static argument.

    Example: Objective(loss="ppo", clip_low=0.2, clip_high=0.28, weight_cap=5.0)
    """

    loss: str = "ppo"  # "ppo": clipped surrogate; "cispo": clipped weight on the log-likelihood; "sft": negative log-likelihood
    ratio_level: str = "token"  # "token", or "sequence" (GSPO): where r is taken
    clip_low: float = 0.2  # r is clipped at 1 - clip_low
    clip_high: float = 0.2  # and at 1 + clip_high
    dual_clip: float | None = None  # > 1: bound on r where the advantage is negative; None: off
    decoupled: bool = True  # weigh tokens by pi_proximal / pi_behave
    proximal: str = "recomputed"  # "recomputed" (given, or the current policy's own), "behavior", "interpolated"
    weight_cap: float | None = None
    cap_mode: str = "clamp"  # "clamp": weight the cap; "mask": weight 0
    cap_level: str = "token"  # "token", or "sequence": the product over a trajectory's trained tokens
    kl_coef: float = 0.0  # coefficient of the KL to the reference inside the loss
    kl_estimator: str = "k3"  # "k1", "k2", "k3", for its value; the gradient is always that of reverse KL
    entropy_coef: float = 0.0
    distill_coef: float = 0.0  # coefficient of the reverse KL to the teacher

    @classmethod
    def from_config(cls, config: Config) -> Objective:
        """Makes the objective of a config that `rljax.config.checks` has passed."""
        actor = config.actor
        return cls(
            loss=actor.loss,
            ratio_level=actor.importance_sampling_level,
            clip_low=actor.eps_clip,
            clip_high=config.clip_high,
            dual_clip=actor.c_clip,
            decoupled=actor.use_decoupled_loss,
            proximal=_proximal(actor),
            weight_cap=actor.behav_imp_weight_cap,
            cap_mode=actor.behav_imp_weight_mode,
            cap_level=actor.behav_imp_weight_level,
            kl_coef=actor.kl_ctl if actor.kl_placement == "loss" else 0.0,
            kl_estimator=actor.kl_estimator,
            entropy_coef=actor.entropy_coef,
            distill_coef=actor.distill.coef if actor.distill.teacher else 0.0,
        )

    @property
    def by_token(self) -> bool:
        """True if a token's loss depends on that token alone.

        The fused log-prob op may then cut rows anywhere.
        """
        return self.ratio_level == "token" and not (self.decoupled and self.cap_level == "sequence")

    @property
    def by_advantage(self) -> bool:
        """True if a token of advantage 0 has no gradient: no other term of the loss gives it one."""
        return self.loss != "sft" and not (self.kl_coef or self.entropy_coef or self.distill_coef)

    def moved_by(self, tokens: TokenArrays) -> Any:
        """Returns which tokens may have a gradient, bool in the shape of `tokens.mask`."""
        return tokens.mask & (tokens.advantage != 0) if self.by_advantage else tokens.mask

    def needs_score(self, n_minibatches: int) -> bool:
        """Returns whether a forward pass must supply proximal log-probs.

        It need not if the first minibatch is the only one, since the proximal policy is then the
        current one, nor if the proximal policy is the behavior policy or interpolated.
        """
        return self.proximal == "recomputed" and n_minibatches > 1 and self.loss != "sft"


def _proximal(actor: ActorConfig) -> str:
    if actor.prox_logp_method == "loglinear":
        return "interpolated"
    return "recomputed" if actor.recompute_logprob else "behavior"
