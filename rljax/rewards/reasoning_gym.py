"""The reasoning-gym reward: the score of the dataset's own scorer, in [0, 1].

For prompts of "task:reasoning_gym/<dataset>". The answer is the content of the last
<answer>...</answer>, or the whole completion if it has none.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from rljax.data.tasks import make_reasoning_gym
from rljax.rewards.shapes import reads
from rljax.types import Prompt


@reads("reasoning_gym", "question")
def reward(prompt: Prompt, completion: str) -> dict[str, float]:
    from reasoning_gym.utils import extract_answer

    made = prompt.fields["reasoning_gym"]
    dataset = _dataset(made["dataset"], json.dumps(made["arguments"], sort_keys=True))
    entry = dataset[made["index"]]  # generated again, because JSON would change its tuples
    if entry["question"] != prompt.fields["question"]:
        raise ValueError(f"reasoning_gym made another question of index {made['index']}: its version differs?")
    answer = extract_answer(completion)
    score = float(dataset.score_answer(completion.strip() if answer is None else answer, entry))
    return {"reward": score, "reasoning_gym": score}


@functools.lru_cache(maxsize=8)
def _dataset(name: str, arguments: str) -> Any:
    return make_reasoning_gym(name, json.loads(arguments))


def answer_of(completion: str) -> str | None:
    """Returns the answer as it is scored, apart from white space around it."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion)
    return (completion if answer is None else answer).strip() or None
