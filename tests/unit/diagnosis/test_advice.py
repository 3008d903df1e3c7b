"""Advice about another trainer's log names only what that trainer has."""

import re

import numpy as np
import pytest

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.diagnosis import RULES, advice, diagnose
from tests.unit.diagnosis import made

TRAINERS = sorted(advice.KEYS)


def _leaves(tree, prefix=""):
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")


def test_clauses_are_kept_left_out_or_reworded():
    text = "rljax train with a third of actor.optimizer.lr; rljax parity --config=CONFIG; read ten completions"
    assert advice.reword(text, "trl") == "train with a third of learning_rate; read ten completions"
    assert advice.reword(text, "verl").startswith("train with a third of actor_rollout_ref.actor.optim.lr; ")
    assert advice.reword(text, advice.OWN) == text
    assert advice.reword("set rollout.workers; sort WORKDIR/samples.jsonl", "trl") == ""


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_rule_tells_another_trainer_of_our_commands_files_or_keys(trainer):
    own = {key for key in _leaves(config_io.to_dict(Config())) if "." in key}
    for rule in RULES:
        for text in (rule.next, *rule.causes):
            said = advice.reword(text, trainer)
            assert not re.search(r"rljax|WORKDIR|jsonl", said), rule.id
            assert not own & set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", said)), (rule.id, said)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_keys_that_are_reworded_exist(trainer):
    assert set(advice.KEYS[trainer]) <= set(_leaves(config_io.to_dict(Config())))


def test_a_cause_refers_to_no_rule_that_could_not_be_judged():
    """A log of TRL has importance weights, and not those of lag 0 that tell disagreement."""
    away = made.healthy() | {"ppo_actor/update/behave_imp_weight/avg": np.full(made.STEPS, 1.5)}
    lag0 = "ppo_actor/behave_log_ratio_lag0"
    for columns, refers in ((away, True), ({name: values for name, values in away.items() if name != lag0}, False)):
        diagnosis = diagnose(made.history(columns))
        (finding,) = [finding for finding in diagnosis.findings if finding.rule == "policy.behave_imp_weight"]
        assert any("policy.sampler_disagrees" in cause for cause in finding.causes) is refers
        assert any(cause.startswith("sampler and learner disagree") for cause in finding.causes)
    both = "disagree, or stale: see policy.sampler_disagrees and freshness.stale_weights"
    assert advice.refer(both, {"policy.sampler_disagrees"}) == "disagree, or stale: see freshness.stale_weights"


def test_every_reference_to_a_rule_is_to_one_that_exists_and_is_left_out_with_it():
    ids = {rule.id for rule in RULES}
    for rule in RULES:
        for cause in rule.causes:
            named = set(re.findall(r"[a-z]+\.[a-z_]+", cause)) & ids
            assert not ids & set(re.findall(r"[a-z]+\.[a-z_]+", advice.refer(cause, named))), cause
            assert set(re.findall(r"see ([a-z]+\.[a-z_]+)", cause)) <= named, cause
