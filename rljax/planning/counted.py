"""Numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun. Example: counted(2, "device") == "2 devices"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
