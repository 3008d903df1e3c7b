"""A reward that differs between samples of any prompt and model, so weights change at each step."""

from __future__ import annotations

from rljax.types import Prompt


def reward(prompt: Prompt, completion: str) -> dict[str, float]:
    return {"reward": sum(map(str.isdigit, completion)) / max(1, len(completion)) + 0.01 * (hash_of(completion) % 10)}


def hash_of(text: str) -> int:
    """Hashes a text, with the same result in every process."""
    return sum((index + 1) * ord(letter) for index, letter in enumerate(text))
