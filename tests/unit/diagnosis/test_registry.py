"""Rules of other packages are found by their entry points."""

from importlib import metadata

import pytest

from rljax import entry_points
from rljax.diagnosis import RULES, Rule, all_rules, diagnose
from rljax.diagnosis.finding import Link, Severity
from rljax.diagnosis.registry import GROUP
from rljax.diagnosis.rule import Sign, rule
from rljax.errors import UserError
from tests.unit.diagnosis import made

MODULE = __name__


@rule("environment.mine", "It always speaks.", causes=("it is a test",), next="nothing")
def mine(history):
    return Sign(Severity.BROKEN, history.first_step, "1 of 1")


twice = [mine, mine]
no_rules = [1, 2]
no_link = Rule("weather.rain", "It rains.", lambda history: None)


def install(monkeypatch, *attributes: str):
    points = tuple(metadata.EntryPoint(name, f"{MODULE}:{name}", GROUP) for name in attributes)
    monkeypatch.setattr(entry_points, "installed", lambda group=None: points if group == GROUP else ())
    monkeypatch.setattr(metadata.EntryPoint, "load", lambda point: globals()[point.attr])


def test_without_others_the_rules_are_our_own():
    assert sorted(each.id for each in all_rules()) == sorted(each.id for each in RULES)


def test_a_rule_of_another_package_judges_beside_ours(monkeypatch):
    install(monkeypatch, "mine")
    first = diagnose(made.history()).first_break
    assert first is not None and (first.rule, first.link) == ("environment.mine", Link.ENVIRONMENT)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "two rules"),
        ("no_rules", "no Rule"),
        ("no_link", "begins with a link"),
        ("gone", "can't be loaded"),
    ],
)
def test_a_wrong_entry_point_is_an_error_that_names_it(monkeypatch, name, message):
    install(monkeypatch, name)
    with pytest.raises(UserError, match=message):
        all_rules()
