"""Causal attention over packed rows: one interface, an implementation per kernel, and the choice
between them.
"""
