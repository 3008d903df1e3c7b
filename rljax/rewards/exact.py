"""1 when the completion is the answer, white space around either aside; else 0."""

from __future__ import annotations

from rljax.types import Prompt


def reward(prompt: Prompt, completion: str) -> dict[str, float]:
    right = float(completion.strip() == str(prompt.fields["answer"]).strip())
    return {"reward": right, "exact": right}
