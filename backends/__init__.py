"""Stateless arithmetic, one package a framework. Import as `rljax.backends`."""
