"""The lines that `python -m tests.mutation` plants faults in, and the tests that should see them, exist."""

from pathlib import Path

from tests.mutation.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_every_line_and_every_test_of_a_planted_fault_is_there():
    texts = {fault.file: (ROOT / fault.file).read_text() for fault in FAULTS}
    assert [str(fault) for fault in FAULTS if fault.old not in texts[fault.file]] == []
    names = {name for fault in FAULTS for name in fault.tests if "/" in name}
    for name in names:
        path, *inside = name.split("::")
        assert (ROOT / path).exists(), name
        suite = (ROOT / "rljax/testing/parity_suite.py").read_text() if path.startswith("tests/parity") else ""
        text = (ROOT / path).read_text() + suite if inside else ""
        assert all(f"def {part}(" in text or f"class {part}(" in text for part in inside), name
