"""A reward that differs between the completions of any model, for rehearsals of runs."""

from __future__ import annotations


def reward(prompt: str, completion: str) -> float:
    """Returns a number from 0 to 6/7 that changes with every character."""
    return sum(map(ord, completion)) % 7 / 7
