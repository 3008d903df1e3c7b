"""Contract and baselines: each fault of an environment or of its reward is named."""

import asyncio
import itertools
import random
import sys
import types

import pytest

from rljax.environments import Source
from rljax.environments.checks import check_environments
from rljax.types import Prompt

CLOCK = itertools.count()


class Coin:
    """Two steps; says "a" or "b", and pays `right` for saying it again, else `wrong`."""

    def __init__(self, right=1.0, wrong=0.0, fault=""):
        self.right, self.wrong, self.fault = right, wrong, fault

    def reset(self, seed):
        if self.fault == "reset":
            raise ValueError("no\nboard")
        self.chance = random.Random(next(CLOCK) if self.fault == "chance" else seed)
        self.left = 2
        return self.toss()

    def toss(self):
        self.side = self.chance.choice("ab") if self.fault != "late" else "a"
        return self.side

    def step(self, action):
        self.left -= self.fault != "endless"
        pay = self.right if action == self.side else self.wrong
        if self.fault == "rare":
            pay = float(action == self.side == "never")
        if self.fault == "late" and not self.left:
            pay += next(CLOCK)
        if self.fault == "tail":
            pay = self.chance.paretovariate(0.4)
        if self.fault == "int flag":
            return self.toss(), pay, int(self.left == 0), False, {}
        return self.toss(), pay, self.left == 0, False, {}

    def random_action(self, generator):
        if self.fault == "policy":
            raise RuntimeError("no idea")
        return generator.choice("ab")

    def expert_action(self):
        return self.side


class Alone:
    def reset(self, seed):
        return "go"

    def step(self, action):
        return "", 1.0, True, False, {}


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    module = types.ModuleType("own_environments")
    module.Coin, module.Alone = Coin, Alone
    monkeypatch.setitem(sys.modules, "own_environments", module)


def prompts(name="own_environments:Coin", observation=None, n=20, **arguments):
    def first(seed):
        return observation or random.Random(seed).choice("ab")

    return [
        Prompt(
            f"0/{seed}", ({"role": "user", "content": first(seed)},), {"environment": Source(name, seed, arguments).to_json()}
        )
        for seed in range(n)
    ]


def remarks(*args, episodes=100, **kwargs):
    found = asyncio.run(check_environments(prompts(*args, **kwargs), timeout=5.0, episodes=episodes))
    assert all("\n" not in remark.line for remark in found)
    return found


def faults(*args, **kwargs):
    return [(r.severity, r.line) for r in remarks(*args, **kwargs) if r.severity in ("error", "warning")]


def test_a_sound_environment_is_good_and_shows_its_baselines():
    found = remarks()
    assert [remark.severity for remark in found] == ["good", "note", "note", "good"]
    assert "the same seed gives the same episode" in found[0].line
    # the expert gets both of two tosses; chance gets 2, 1, 0 in the ratio 1:2:1
    assert "the expert earns 2 on average in 2 turns (2: 100)" in found[2].line
    assert found[1].line.startswith("own_environments:Coin: a random policy earns ") and "(0: " in found[1].line


FAULTS = {
    "raises": ({"fault": "reset"}, "error", "own_environments:Coin.reset raised ValueError: no board"),
    "seed is not used": ({"fault": "chance"}, "error", "differs between two episodes of the same actions"),
    "chance beside the seed": ({"fault": "late", "observation": "a"}, "error", "step 2 differs between two episodes"),
    "flag is no bool": ({"fault": "int flag"}, "error", "terminated is a int, not a bool"),
    "another observation": ({"observation": "c"}, "warning", "is not what its reset returns"),
    "never ends": ({"fault": "endless", "n": 1}, "warning", "episodes had not ended after 200 turns"),
    "the policy raises": ({"fault": "policy"}, "error", "raised RuntimeError: no idea"),
    "cost for reward": ({"right": -1.0}, "error", "the sign is confused"),
    "pays anything": (
        {"wrong": 1.0},
        "error",
        "100% of a random policy's returns are 2, the best there is: anything is accepted",
    ),
    "pays nothing": ({"right": 0.0}, "error", "the expert earns 0, no more than a random policy with 0"),
    "never right": ({"fault": "rare"}, "error", "no more than a random policy"),
    "not finite": ({"right": float("nan")}, "error", "the reward is nan, not a finite number"),
    "tail": ({"fault": "tail"}, "warning", "a long tail"),
    "argument": ({"rigth": 1.0}, "error", "got an unexpected keyword argument 'rigth' (it takes: right, wrong, fault)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named(name):
    arguments, severity, line = FAULTS[name]
    found = faults(episodes=10 if name == "never ends" else 100, **arguments)
    assert any(kind == severity and line in text for kind, text in found), found


def test_environments_without_policies_have_their_contract_checked():
    found = remarks("own_environments:Alone", observation="go")
    assert [remark.severity for remark in found] == ["good", "note", "note"]
    assert "no method random_action" in found[1].line
    assert asyncio.run(check_environments([Prompt("0/0", (), {"answer": "1"})])) == []


def test_guess_the_number_pays_for_halving():
    from rljax.data.tasks import make_task

    made = make_task("task:guess_number", "train", {"n": 40, "size": 31, "guesses": 5}, "train_dataset")
    given = [Prompt(f"0/{i}", tuple(made[i]["messages"]), {"environment": made[i]["environment"]}) for i in range(40)]
    found = asyncio.run(check_environments(given))
    assert [remark.severity for remark in found] == ["good", "note", "note", "good"], found
    assert "the expert earns 1 on average" in found[2].line
