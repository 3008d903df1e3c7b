"""Faults that are planted stand in the code as it is."""

import re

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
