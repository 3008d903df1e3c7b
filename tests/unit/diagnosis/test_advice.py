"""Advice about another trainer's log names only what that trainer has."""

import re

import pytest

from rljax.config import io as config_io
from rljax.config.schema import Config
from rljax.diagnosis import RULES, advice

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
