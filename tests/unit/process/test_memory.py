"""Memory in use by this process."""

import numpy as np
import pytest

from rljax.process import memory


@pytest.mark.skipif(not memory.STATM.exists(), reason="the system does not tell")
def test_an_array_that_is_written_is_in_use():
    before = memory.resident_bytes()
    array = np.ones(64 << 20, np.uint8)
    assert memory.resident_bytes() - before > array.nbytes / 2


def test_a_system_that_does_not_tell_gives_none(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "STATM", tmp_path / "absent")
    assert memory.resident_bytes() is None
