import dataclasses
from types import SimpleNamespace

import pytest

from rljax.errors import UserError
from rljax.objective.spec import Objective


def config_of(**actor):
    """The part of a Config that an objective is made from, with the defaults of configs/base.py."""
    defaults = dict(
        loss="ppo",
        importance_sampling_level="token",
        eps_clip=0.2,
        eps_clip_higher=None,
        c_clip=None,
        use_decoupled_loss=True,
        recompute_logprob=True,
        prox_logp_method="recompute",
        behav_imp_weight_cap=5.0,
        behav_imp_weight_mode="clamp",
        behav_imp_weight_level="token",
        kl_ctl=0.1,
        kl_estimator="k3",
        kl_placement="loss",
        entropy_coef=0.0,
        distill=SimpleNamespace(teacher="", coef=0.5),
    )
    return SimpleNamespace(actor=SimpleNamespace(**defaults | actor))


def test_it_is_a_static_argument():
    a, b = Objective.from_config(config_of()), Objective.from_config(config_of())
    assert a == b and hash(a) == hash(b)
    assert a != dataclasses.replace(a, clip_high=0.28)


def test_the_upper_clip_defaults_to_the_lower():
    assert Objective.from_config(config_of(eps_clip=0.15)).clip_high == 0.15
    assert Objective.from_config(config_of(eps_clip_higher=0.28)).clip_high == 0.28


def test_distillation_is_on_where_there_is_a_teacher():
    assert Objective.from_config(config_of()).distill_coef == 0
    objective = Objective.from_config(config_of(kl_ctl=0.0, distill=SimpleNamespace(teacher="models/teacher", coef=0.5)))
    assert objective.distill_coef == 0.5
    assert objective.by_token and objective.trains_zero_advantage  # a token without a reward still has something to learn


def test_a_kl_in_the_reward_is_not_in_the_loss():
    assert Objective.from_config(config_of()).kl_coef == 0.1
    assert Objective.from_config(config_of(kl_placement="reward")).kl_coef == 0


@pytest.mark.parametrize(
    "keys, proximal, scored",
    [
        (dict(), "recomputed", True),
        (dict(prox_logp_method="loglinear", recompute_logprob=False), "interpolated", False),
        (dict(use_decoupled_loss=False, recompute_logprob=False), "behavior", False),
        (dict(use_decoupled_loss=False), "recomputed", True),
        (dict(loss="sft"), "recomputed", False),
    ],
)
def test_which_policy_is_proximal_and_whether_it_is_scored(keys, proximal, scored):
    objective = Objective.from_config(config_of(**keys))
    assert objective.proximal == proximal
    assert objective.needs_score(4) == scored
    assert not objective.needs_score(1)  # one minibatch: proximal is current


@pytest.mark.parametrize(
    "keys, culprit",
    [
        (dict(recompute_logprob=False), "actor.use_decoupled_loss"),
        (dict(use_decoupled_loss=False, prox_logp_method="loglinear"), "actor.prox_logp_method"),
        (dict(c_clip=1.0), "actor.c_clip"),
        (dict(eps_clip=1.2), "actor.eps_clip:"),
        (dict(eps_clip_higher=-0.1), "actor.eps_clip_higher"),
        (dict(behav_imp_weight_cap=0.0), "actor.behav_imp_weight_cap"),
        (dict(behav_imp_weight_mode="clip"), "actor.behav_imp_weight_mode"),
        (dict(kl_estimator="k4"), "actor.kl_estimator"),
        (dict(kl_placement="both"), "actor.kl_placement"),
        (dict(loss="cispo", importance_sampling_level="sequence"), "actor.importance_sampling_level"),
    ],
)
def test_contradictions_name_their_key(keys, culprit):
    with pytest.raises(UserError, match=culprit):
        Objective.from_config(config_of(**keys))


def test_only_objectives_by_token_may_be_cut_between_tokens():
    assert Objective().by_token
    assert not Objective(ratio_level="sequence").by_token
    assert not Objective(cap_level="sequence").by_token
    assert Objective(cap_level="sequence", decoupled=False).by_token
