"""Faults that are planted stand in the code as it is."""

from tests.mutation.edges import EDGES
from tests.mutation.faults import FAULTS
from tests.shared import REPOSITORY


def test_each_fault_can_be_planted_and_its_tests_are_there() -> None:
    for fault in (*FAULTS, *EDGES):
        text = (REPOSITORY / fault.file).read_text()
        assert fault.planted(text) != text, fault
        for test in fault.tests:
            file, _, name = test.partition("::")
            path = REPOSITORY / file
            assert path.exists() and (not name or f"def {name}(" in path.read_text()), test
