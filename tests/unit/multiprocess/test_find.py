"""Ranks from torchrun's variables, and variables that contradict each other."""

import os

import pytest

from rljax.config.allocation import Pool
from rljax.engine.rank import ProcessRank, from_environment
from rljax.errors import UserError
from rljax.multiprocess.find import find_rank
from rljax.testing import models

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchrun_is_understood():
    process = from_environment(TORCHRUN)
    assert process == ProcessRank(5, 8, 1, 4, "10.0.0.1", 29500, "10.0.0.1/29500/none/2")
    assert not process.one_host


def test_what_is_set_for_a_child_is_what_it_reads():
    process = ProcessRank(2, 3, 2, 3, "127.0.0.1", 4000, "launch", "127.0.0.1:4001")
    assert from_environment(process.variables()) == process


def test_a_second_start_is_told_from_the_first():
    again = from_environment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"})
    assert again.launch != from_environment(TORCHRUN).launch


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_process_is_alone(environment):
    assert from_environment(environment) == ProcessRank()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "8"}, "RANK=8 is not one of WORLD_SIZE=8"),
        ({"RANK": "five"}, "RANK='five' is not a number"),
        ({"MASTER_ADDR": None}, "no MASTER_ADDR"),
    ],
)
def test_nonsense_is_refused(changed, words):
    environment = {name: value for name, value in (TORCHRUN | changed).items() if value is not None}
    with pytest.raises(UserError, match=words):
        from_environment(environment)


def test_the_environment_is_only_borrowed(monkeypatch):
    monkeypatch.setenv("RANK", "before")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ProcessRank(1, 2).in_environment():
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    assert os.environ["RANK"] == "before" and "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("asked", "launched", "expected"),
    [
        (None, {}, (1, 1)),
        (None, TORCHRUN, (8, 8)),
        (2, {}, (1, 2)),  # one process for two processes: the run starts the other
        (8, TORCHRUN, (8, 8)),
        (3, TORCHRUN, None),
    ],
)
def test_how_many_processes_a_jax_learner_has(monkeypatch, asked, launched, expected):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    config = models.config_of(**{"jax.processes": asked})
    if expected is None:
        with pytest.raises(UserError, match="in 3 processes, but WORLD_SIZE=8"):
            find_rank(config, Pool("jax", fsdp=8))
        return
    process, count = find_rank(config, Pool("jax", fsdp=8))
    assert (process.size, count) == expected
