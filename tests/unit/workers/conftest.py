"""Fixtures of runs with workers."""

import pytest


@pytest.fixture
def short_pauses(monkeypatch):
    """Requests that were lost are sent again at once."""
    monkeypatch.setattr("rljax.rollout.producer.FIRST_DELAY", 1e-4)
