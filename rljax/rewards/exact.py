"""Exact match: 1 if the completion is the answer apart from white space around either, else 0."""

from __future__ import annotations

from rljax.rewards.shapes import reads
from rljax.types import Prompt

FIELD = "answer"  # with the gold answer


@reads(FIELD)
def reward(prompt: Prompt, completion: str) -> dict[str, float]:
    right = float(completion.strip() == str(prompt.fields[FIELD]).strip())
    return {"reward": right, "exact": right}
