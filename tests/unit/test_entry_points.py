"""Installed engines by name."""

from rljax import entry_points


def test_a_checkout_brings_its_own_entry_points():
    assert {"jax", "fake"} <= set(entry_points.names())
