"""Digests of a program's functions: equal for the same content, other for any other."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

from rljax.config import digests, registry
from rljax.testing.harness import make_config

SAME = """
import functools, re
import numpy as np

TABLE = np.arange(3.0)
WORDS = {"b": 1, "a": [2, {"z", "y", "x"}]}
PATTERN = re.compile("a+")

def helper(text, *, known=frozenset({"one", "two", "three"})):
    return len(PATTERN.findall(text)) + (text in {"one", "two", "three"})

class Scorer:
    scale = 2.0
    def __init__(self, least=0.5):
        self.least, self.calls = least, 0
    @property
    def most(self):
        return self.least * self.scale
    def __call__(self, prompt, completion):
        self.calls += 1
        return max(self.most, helper(completion) + TABLE[0] + len(WORDS))

def closed(weight):
    def reward(prompt, completion):
        return weight * (lambda x: x + 1)(helper(completion)) + recursive(2)
    return reward

def recursive(n):
    return n and recursive(n - 1)
"""
KINDS = {
    "a closure": "closed(1.0)",
    "an object": "Scorer()",
    "a bound method": "Scorer().__call__",
    "a partial": "functools.partial(closed(1.0), None)",
    "a class": "Scorer",
}
EDITS = {  # what each edit changes is used by every one of KINDS but for those named
    "a helper's constant": ("(text in", "2 * (text in", {}),
    "a helper's default": ('"three"})):', '"four"})):', {}),
    "a pattern": ('"a+"', '"b+"', {}),
    "code": ("return n and", "return n or", {"an object", "a bound method", "a class"}),
    "a global table": ("np.arange(3.0)", "np.arange(4.0)", {"a closure", "a partial"}),
    "a global in a list": ('"y", "x"', '"y", "w"', {"a closure", "a partial"}),
    "an attribute of the class": ("scale = 2.0", "scale = 3.0", {"a closure", "a partial"}),
    "a property": ("self.least * self.scale", "self.least + self.scale", {"a closure", "a partial"}),
    "an attribute of the object": ("least=0.5", "least=0.6", {"a closure", "a partial"}),
}


def digest_of(source, expression):
    names = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), names)
    name = registry.provide(eval(expression, names))
    config = make_config({"reward.name": name})
    return digests.digests_of(config)[f"reward.name {name}"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_anything_that_is_used_changes_the_digest(kind, edit):
    old, new, unused_by = EDITS[edit]
    assert old in SAME
    edited = SAME.replace(old, new)
    assert (digest_of(SAME, KINDS[kind]) == digest_of(edited, KINDS[kind])) is (kind in unused_by)


@pytest.mark.parametrize("kind", KINDS)
def test_comments_lines_and_processes_change_no_digest(kind):
    here = digest_of(SAME, KINDS[kind])
    assert digest_of("# a comment\n\n" + SAME.replace("def helper", "# another\ndef helper"), KINDS[kind]) == here
    program = f"from tests.unit.config.test_digests import *; print(digest_of(SAME, KINDS[{kind!r}]))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        assert subprocess.check_output([sys.executable, "-c", program], text=True, env=environment).strip() == here


def test_an_object_that_counts_its_calls_stays_the_same_one():
    names = {"__name__": "__main__"}
    exec(compile(SAME, "<cell>", "exec"), names)
    scorer = names["Scorer"]()
    config = make_config({"reward.name": registry.provide(scorer)})
    before = digests.digests_of(config)
    scorer(None, "a")
    assert scorer.calls == 1 and digests.digests_of(config) == before


@pytest.mark.parametrize("mode", ["jax:d1", "jax:d2+jax:f2", "sglang:d1+fsdp:d1", "torch:d1", "json:d1", "os:d1"])
def test_a_value_with_a_colon_that_names_nothing_of_the_users_has_no_digest(mode):
    """Some packages answer any name by a function, as jax does, or import all names of others."""
    assert (
        digests.digests_of(make_config({"allocation_mode": mode, "rollout.addr": "http://127.0.0.1:1", "reward.name": "exact"}))
        == {}
    )


def test_what_has_no_digest_ends_no_run():
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError("ask nothing")

    deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
    for odd in (Odd(), deep):
        config = make_config({"reward.name": registry.provide(lambda prompt, completion, odd=odd: np.inf)})
        digests.digests_of(config)


def test_digests_of_another_python_and_of_no_session_say_nothing(caplog):
    digests.warn_of_changes({"reward.name m:f": "python3.9 aa"}, {"reward.name m:f": "python3.11 bb"})
    digests.warn_of_changes({}, {"reward.name m:f": "python3.11 bb"})
    assert not caplog.messages
    digests.warn_of_changes({"reward.name m:f": "python3.11 aa"}, {"reward.name m:f": "python3.11 bb"})
    assert len(caplog.messages) == 1


def test_a_session_that_made_no_step_is_not_the_one_that_is_gone_on_from():
    sessions = [{"first_step": 0, "functions": {"k": "1"}}, {"first_step": 2, "functions": {"k": "2"}}, {"first_step": "?"}]
    assert digests.of_last_step(sessions, 2) == {"k": "1"} and digests.of_last_step(sessions, 3) == {"k": "2"}
    assert digests.of_last_step(sessions, 0) == {} and digests.of_last_step([{"first_step": 0}], 3) == {}
