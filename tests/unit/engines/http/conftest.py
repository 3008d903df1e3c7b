"""Fixtures that tests of clients and of our server share."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from rljax.engines.http import client as client_module
from rljax.engines.http import health
from tests.unit.engines.http.served import Served


@pytest.fixture
def impatient(monkeypatch):
    """Waits of the client and of the watch over its servers, short."""
    monkeypatch.setattr(client_module, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(health, "INTERVAL", 0.05)


@pytest.fixture
def weights(tmp_path) -> Path:
    (tmp_path / "roots" / "7").mkdir(parents=True)
    (tmp_path / "roots" / "7" / "config.json").write_text("{}")
    (tmp_path / "roots" / "7" / "model.safetensors").touch()
    return tmp_path / "roots"


@pytest.fixture
def served(weights):
    with contextlib.closing(Served(weights)) as served:
        yield served
