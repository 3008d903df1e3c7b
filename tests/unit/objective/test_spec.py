import dataclasses

import pytest

from rljax.config.schema import ActorConfig, Config, DistillConfig
from rljax.objective.spec import Objective


def config_of(**actor):
    """The defaults with a KL term, and keys of `actor`."""
    return Config(actor=ActorConfig(**{"kl_ctl": 0.1} | actor))


def test_it_is_a_static_argument():
    a, b = Objective.from_config(config_of()), Objective.from_config(config_of())
    assert a == b and hash(a) == hash(b)
    assert a != dataclasses.replace(a, clip_high=0.28)


def test_the_upper_clip_defaults_to_the_lower():
    assert Objective.from_config(config_of(eps_clip=0.15)).clip_high == 0.15
    assert Objective.from_config(config_of(eps_clip_higher=0.28)).clip_high == 0.28


def test_distillation_is_on_where_there_is_a_teacher():
    assert Objective.from_config(config_of(distill=DistillConfig(coef=0.5))).distill_coef == 0
    objective = Objective.from_config(config_of(kl_ctl=0.0, distill=DistillConfig("models/teacher", 0.5)))
    assert objective.distill_coef == 0.5
    assert objective.by_token


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


def test_only_objectives_by_token_may_be_cut_between_tokens():
    assert Objective().by_token
    assert not Objective(ratio_level="sequence").by_token
    assert not Objective(cap_level="sequence").by_token
    assert Objective(cap_level="sequence", decoupled=False).by_token
