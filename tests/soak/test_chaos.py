"""The chaos run for a minute, and its checker on runs that went wrong. An hour: tests/soak/chaos.py."""

import json

import pytest

from tests.soak import chaos_check
from tests.soak.chaos import chaos

SETTINGS = {"epochs": 1, "prompts": 4, "samples": 1, "lag": 2, "batch": 2, "unproved": {"trainer": 17, "server": 9}}
LEDGER = [
    {"step": 1, "uids": ["0/0", "0/1"], "lag": 0},
    {"step": 2, "uids": ["0/0", "0/2"], "lag": 2},  # undone by a kill
    {"step": 2, "uids": ["0/2", "0/3"], "lag": 1},
]
FINISHED = {"code": 0, "killed": False, "disk_full": False, "status": {"state": "finished", "error": None}}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_or_doubled_whatever_befalls_a_run(tmp_path):
    found, hits = chaos(tmp_path, minutes=1.0, seed=1)
    assert not found, "\n".join(found)
    assert hits["kill_partner"] and hits["stop"] and hits["garbage"]


def test_the_checker_passes_what_is_right():
    assert not list(chaos_check.of_ledger(SETTINGS, LEDGER))
    assert not list(chaos_check.of_endings([FINISHED]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"uids": ["0/2", "0/1"]}, ["prompt 0/3 is lost", "prompt 0/1 was trained on in 2 steps"]),
        ({"lag": 3}, ["a token of step 2 was 3 versions old"]),
        ({"lag": -1}, ["a token of step 2 was -1 versions old"]),
        (
            {"step": 3, "uids": []},
            ["steps 1 to 3, 3 of them, and not 2", "prompt 0/3 is lost", "prompt 0/0 was trained on in 2 steps"],
        ),
    ],
)
def test_the_checker_sees_what_is_wrong(change, said):
    assert list(chaos_check.of_ledger(SETTINGS, [*LEDGER[:2], LEDGER[2] | change])) == said


def test_the_checker_wants_a_reason_of_every_ending():
    silent = FINISHED | {"code": 1, "status": {"state": "running", "error": None}}
    (said,) = chaos_check.of_endings([silent, FINISHED])
    assert said.startswith("ending 0 (exit status 1): no reason in status.json")
    assert list(chaos_check.of_endings([FINISHED, silent | {"killed": True}])) == ["the run never finished"]
    reason = silent | {"status": {"state": "failed", "error": "checkpoints: cannot write"}}
    assert not list(chaos_check.of_endings([reason, FINISHED]))


def test_the_checker_sees_growth_and_no_coming_and_going(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(SETTINGS))
    (tmp_path / "ledger.jsonl").write_text("\n".join(map(json.dumps, LEDGER)) + "\n")
    (tmp_path / "endings.jsonl").write_text(json.dumps(FINISHED) + "\n")

    def said(name, **changes):
        at = {"files": lambda second: 10, "strangers": lambda second: 0, "bytes": lambda second: 1 << 20} | changes
        samples = [{"name": name, "pid": 7} | {what: of(second) for what, of in at.items()} for second in range(60)]
        (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)) + "\n")
        return list(chaos_check.violations(tmp_path))

    leak = {"files": lambda second: 10 + 3 * second}  # of samples 5 to 29 and 30 to 59 the least are 25 and 100
    assert said("server 1", **leak) == ["server 1 (process 7) has 75 more files in its second half, of 60 s"]
    busy = {"files": lambda second: 10 + second * (second % 20 > 0)}  # more and more, but it comes to rest
    for name, most in (("trainer 0", 17), ("server 1", 9), ("worker 1", 0)):
        assert not said(name, **busy, strangers=lambda second, most=most: most)
        crowd = [f"{name} (process 7) had {most + 1} connections of strangers, and not {most} at most"]
        assert said(name, strangers=lambda second, most=most: (most + 1) * (second == 3)) == crowd
    heavy = said("worker 1", bytes=lambda second: second << 20)
    assert heavy == [f"worker 1 (process 7) has {30 << 20} more bytes in its second half, of 60 s"]
