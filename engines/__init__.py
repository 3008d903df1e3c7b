"""Stateful samplers, learners and publishing. Import as `rljax.engines`."""
