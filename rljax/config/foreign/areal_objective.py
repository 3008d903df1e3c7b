"""Conversion of the keys of AReaL's actor that decide rewards, advantages, weights and the loss.

tests/unit/config/test_areal_formulas.py compares each formula with theirs by numbers. A setting
whose formula is not here is refused by its name, with what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rljax.errors import UserError

Flat = dict[str, Any]  # dotted key -> value

NORMS = ("reward_norm", "adv_norm")
_OLD_WEIGHT = ("behav_imp_weight_cap", "behave_imp_weight_cap", "behave_imp_weight_mode")


def objective(theirs: Flat) -> Flat:
    """Converts the objective of a reinforcement run. Raises UserError for what has no formula here."""
    if theirs.get("train_dataset.type") == "sft":
        return {"actor.loss": "sft"}
    for refusal in REFUSALS:
        if refusal.applies(theirs):
            raise UserError(f"{refusal.key}: {refusal.why if isinstance(refusal.why, str) else refusal.why(theirs)}")
    critic = _has_section(theirs, "critic")
    discount, gae_lambda = theirs.get("actor.discount", 1.0), theirs.get("actor.gae_lambda", 1.0)
    # Without a critic theirs has values of 0: the advantage is then the sum of (discount lambda)^k r
    discounts = {"actor.discount": discount if critic else discount * gae_lambda, "actor.gae_lambda": gae_lambda}
    return {
        "actor.kl_placement": "reward",
        "actor.adv_estimator": "gae" if critic else "grpo",
        "actor.loss_aggregation": "token-mean",
        "actor.overlong_tokens": theirs.get("actor.overlong_tokens") or 0,
        "actor.overlong_penalty_factor": theirs.get("actor.overlong_penalty_factor") or 0.0,
        **discounts,
        **_weight(theirs),
        **_norm(theirs, "reward_norm"),
        **_norm(theirs, "adv_norm"),
    }


def _weight(theirs: Flat) -> Flat:
    """Converts the decoupled weight, and the policy that the ratio is taken to."""
    decoupled = theirs.get("actor.use_decoupled_loss", False)
    recompute = theirs.get("actor.recompute_logprob", theirs.get("actor.recompute_logprobs", False))
    plain = {"actor.use_decoupled_loss": False, "actor.prox_logp_method": "recompute"}
    if not decoupled:
        return plain | {"actor.recompute_logprob": bool(recompute)}
    section = _section(theirs, "actor.rejection_sampling")
    cap = theirs.get("actor.behav_imp_weight_cap", theirs.get("actor.behave_imp_weight_cap"))
    mode = theirs.get("actor.behave_imp_weight_mode", "token_mask")
    if section:
        cap, mode = section.get("upper", 5.0), f"{section.get('level', 'token')}_{section.get('action', 'mask')}"
    elif "actor.rejection_sampling" in theirs:
        mode = "disabled"
    if mode == "disabled":  # the ratio to the recomputed policy, and no weight
        return plain | {"actor.recompute_logprob": True}
    modes = {"token_mask": "mask", "token_truncate": "clamp", "token_clamp": "clamp"}
    if mode not in modes:
        raise UserError(f"actor: weights are capped by token here (level token), not by {mode!r}: theirs is a geometric mean")
    return {
        "actor.use_decoupled_loss": True,
        "actor.prox_logp_method": "recompute",
        "actor.recompute_logprob": True,
        "actor.behav_imp_weight_cap": cap,
        "actor.behav_imp_weight_mode": modes[mode],
        "actor.behav_imp_weight_level": "token",
    }


def _norm(theirs: Flat, name: str) -> Flat:
    """Converts a norm: a missing one is off, a missing level of one that is there is the batch."""
    prefix = f"actor.{name}."
    default = "batch" if _has_section(theirs, f"actor.{name}") else None
    levels = {level: theirs.get(prefix + level, default) or "none" for level in ("mean_level", "std_level")}
    return {
        prefix + "mean_level": levels["mean_level"],
        prefix + "std_level": levels["std_level"],
        prefix + "mean_leave1out": theirs.get(prefix + "mean_leave1out", False),
        prefix + "std_leave1out": False,
        prefix + "std_unbiased": theirs.get(prefix + "std_unbiased", True),
        prefix + "std_floor": 0.0,
        prefix + "eps": theirs.get(prefix + "eps", 1e-5),
    }


# What is refused -------------------------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A setting that has no counterpart here."""

    key: str
    applies: Callable[[Flat], Any]
    why: str | Callable[[Flat], str]  # what theirs does, and in parentheses what to write


def _has_section(theirs: Mapping[str, Any], section: str) -> bool:
    """Returns whether a section is there, be it an empty one, and not null."""
    return theirs.get(section) == {} or any(key.startswith(f"{section}.") for key in theirs)


def _section(theirs: Mapping[str, Any], section: str) -> Flat:
    return {key.rpartition(".")[2]: value for key, value in theirs.items() if key.startswith(f"{section}.")}


def _said(theirs: Flat, key: str, default: Any) -> str:
    """Returns a value as their file has it; one that it lacks as their default."""
    if key not in theirs:
        return f"{default} (not set, their default)"
    return "null" if theirs[key] is None else str(theirs[key])


def _silent_about_weight(theirs: Flat) -> bool:
    said = [f"actor.{key}" in theirs for key in (*_OLD_WEIGHT, "rejection_sampling")]
    return not any(said) and not _has_section(theirs, "actor.rejection_sampling")


def _no_cap(theirs: Flat) -> bool:
    disabled = theirs.get("actor.behave_imp_weight_mode") == "disabled"
    return "actor.behave_imp_weight_cap" in theirs and theirs["actor.behave_imp_weight_cap"] is None and not disabled


def _kl(theirs: Flat) -> bool:
    return bool(theirs.get("actor.kl_ctl", 0.1))


def _of_norm(name: str) -> tuple[Refusal, ...]:
    """Returns the refusals that hold for a norm."""
    prefix = f"actor.{name}."

    def mean_of(theirs: Flat) -> Any:
        return theirs.get(prefix + "mean_level", "batch")

    def grouped(theirs: Flat) -> bool:
        return "group" in (mean_of(theirs), theirs.get(prefix + "std_level"))

    return (
        Refusal(
            f"{prefix}mean_leave1out",
            lambda t: t.get(prefix + "mean_leave1out") and t.get(prefix + "std_level", "batch"),
            "true with a std_level: theirs takes the std about the leave-one-out mean, which gives the plain norm back "
            "(leave it out, or std_level: null)",
        ),
        Refusal(
            f"{prefix}std_level",
            lambda t: _has_section(t, f"actor.{name}") and t.get(prefix + "std_level", "batch") not in (None, mean_of(t)),
            lambda t: (
                f"{_said(t, prefix + 'std_level', 'batch')} is not that of the mean, "
                f"{prefix}mean_level: {_said(t, prefix + 'mean_level', 'batch')}: theirs takes the std about that other mean, "
                "or about 0 (the same level, or std_level: null)"
            ),
        ),
        Refusal(
            f"{prefix}group_size",
            lambda t: grouped(t) and prefix + "group_size" not in t and t.get("gconfig.n_samples", 1) != 1,
            "not set, and theirs is 1: every group of one minus its mean is 0 (group_size: ${gconfig.n_samples})",
        ),
        Refusal(
            f"actor.group_{name}",
            lambda t: t.get(f"actor.group_{name}"),
            f"true is of before v0.3.4, with another std and eps (say {name}: {{mean_level: group, std_level: group, "
            "group_size: N, std_unbiased: …, eps: …})",
        ),
    )


REFUSALS = (
    Refusal(
        "actor.mask_no_eos_with_zero",
        lambda t: t.get("actor.mask_no_eos_with_zero"),
        "true gives the longest rows of a batch a reward of 0, whatever cut them; here actor.mask_no_eos leaves those that "
        "were cut at gconfig.max_new_tokens untrained (false, and --config.actor.mask_no_eos=True)",
    ),
    Refusal(
        "actor.kl_ctl",
        lambda t: _kl(t) and not _has_section(t, "ref"),
        lambda t: (
            f"{_said(t, 'actor.kl_ctl', 0.1)} without a section ref: theirs then takes the reference's log-probs for 0 "
            "(kl_ctl: 0.0, or a ref with the actor's path)"
        ),
    ),
    Refusal(
        "actor.recompute_logprob",
        lambda t: (
            _kl(t)
            and not t.get("actor.use_decoupled_loss", False)
            and t.get("actor.recompute_logprob", t.get("actor.recompute_logprobs", False))
        ),
        lambda t: (
            f"true with actor.kl_ctl: {_said(t, 'actor.kl_ctl', 0.1)} and no decoupled loss: theirs takes the KL reward of "
            "recomputed log-probs, rljax of those that sampled (recompute_logprob: false, or kl_ctl: 0.0)"
        ),
    ),
    Refusal(
        "actor.importance_sampling_level",
        lambda t: t.get("actor.importance_sampling_level", "token") != "token",
        "sequence is averaged over tokens there, over sequences here as in GSPO (token, and "
        "--config.actor.importance_sampling_level=sequence --config.actor.loss_aggregation=seq-mean-token-mean)",
    ),
    Refusal(
        "actor.prox_logp_method",
        lambda t: t.get("actor.prox_logp_method") == "loglinear" and t.get("actor.use_decoupled_loss", False),
        "loglinear puts the proximal policy one version before the current one there, at the start of the update here "
        "(recompute, and --config.actor.prox_logp_method=loglinear)",
    ),
    Refusal(
        "actor.rejection_sampling",
        lambda t: t.get("actor.use_decoupled_loss", False) and _silent_about_weight(t),
        "not set, with use_decoupled_loss: no weight in v1, one capped at 5 in v0.4 and v0.5, one without a cap before (null "
        "for no weight, or its upper)",
    ),
    Refusal(
        "actor.rejection_sampling.metric",
        lambda t: t.get("actor.rejection_sampling.metric", "ratio") != "ratio",
        "is not implemented but for ratio",
    ),
    Refusal(
        "actor.rejection_sampling.lower",
        lambda t: t.get("actor.rejection_sampling.lower"),
        "is not implemented (null; upper alone bounds the weight)",
    ),
    Refusal(
        "actor.behave_imp_weight_cap",
        _no_cap,
        "null is no number (behave_imp_weight_mode: disabled for no weight)",
    ),
    Refusal(
        "actor.reward_norm",
        lambda t: _has_section(t, "critic") and _has_section(t, "actor.reward_norm"),
        "is not applied to rewards that a critic learns here (null; adv_norm is)",
    ),
    Refusal(
        "actor.dynamic_sampling",
        lambda t: t.get("actor.dynamic_sampling"),
        "true makes a batch smaller there; here it is filled from later prompts (false, and "
        "--config.rollout.should_accept_fn=mixed_rewards)",
    ),
    Refusal(
        "actor.max_new_tokens",
        lambda t: (
            t.get("actor.overlong_reward_penalty")
            and t.get("actor.max_new_tokens", 1024) != t.get("gconfig.max_new_tokens", 16384)
        ),
        "the overlong penalty counts from it (1024 if not set), and differs from gconfig's (${gconfig.max_new_tokens})",
    ),
    *_of_norm("reward_norm"),
    *_of_norm("adv_norm"),
)
