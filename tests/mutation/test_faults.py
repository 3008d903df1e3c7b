"""Faults that are planted stand in the code as it is, and the program that plants them reads its line."""

import re
from collections import Counter

import pytest

from tests.mutation import __main__ as program
from tests.mutation.edges import EDGES
from tests.mutation.faults import FAULTS
from tests.shared import REPOSITORY

SUITES = "\n".join(path.read_text() for path in (REPOSITORY / "rljax" / "testing").rglob("*.py"))  # subclassed by tests


def test_each_fault_can_be_planted_and_its_tests_are_there() -> None:
    for fault in (*FAULTS, *EDGES):
        text = (REPOSITORY / fault.file).read_text()
        assert fault.planted(text) != text, fault
        for test in (argument for argument in fault.tests if argument.startswith("tests/")):
            file, *names = test.split("::")
            path = REPOSITORY / file
            assert path.exists(), test
            for name in names:
                assert re.search(rf"(def|class) {name}\b", path.read_text() + SUITES), test


def test_words_choose_faults_and_anything_else_plants_none(capsys: pytest.CaptureFixture[str]) -> None:
    everything, listed = program.chosen([])
    assert everything == [*FAULTS, *EDGES] and not listed
    some, listed = program.chosen(["buffer", "--list"])
    assert listed and some == [fault for fault in everything if "buffer" in str(fault)]
    for line, status in ((["--help"], 0), (["--lst"], 2), (["no such fault"], 2)):
        with pytest.raises(SystemExit) as ended:
            program.chosen(line)
        assert ended.value.code == status
    assert "usage: python -m tests.mutation" in capsys.readouterr().out


@pytest.mark.parametrize(("outcome", "status"), [("killed", 0), ("timed out", 0), ("SURVIVED", 1), ("HANGS", 1), ("BROKEN", 1)])
def test_the_exit_status_counts_what_was_not_seen(outcome: str, status: int) -> None:
    assert program.exit_status(Counter({outcome: 1, "survived, with a reason": 1})) == status
