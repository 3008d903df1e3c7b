"""1 when the completion's final answer equals the gold answer as mathematics, else 0 (math-verify).

The final answer is what follows the last "####" where there is one, as in the data set's own solutions; else what
math-verify finds: the last \\boxed{}, "the answer is ...", or the last expression.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from rljax.types import Prompt


def reward(prompt: Prompt, completion: str) -> dict[str, float]:
    """Against `answer`."""
    right = _right(prompt.fields["answer"], completion)
    return {"reward": right, "math": right}


def gsm8k_reward(prompt: Prompt, completion: str) -> dict[str, float]:
    """Against `final`, which data of type "gsm8k" has."""
    right = _right(prompt.fields["final"], completion)
    return {"reward": right, "gsm8k": right}


def _right(answer: Any, completion: str) -> float:
    from math_verify import verify

    gold = _gold(str(answer))
    # No timeouts of its own: they work by SIGALRM, on the main thread only, and count a slow check as a wrong answer.
    # The pool's timeout kills the process instead, and counts a timeout.
    return float(verify(gold, _parse(_final_part(completion)), timeout_seconds=None))


def _final_part(completion: str) -> str:
    _, mark, after = completion.rpartition("####")
    line = after.strip().split("\n", 1)[0]
    return line if mark and line else completion


@functools.lru_cache(maxsize=4096)  # the n_samples completions of a prompt share it
def _gold(final: str) -> Any:
    gold = _parse(final)
    if not gold:
        raise ValueError(f"the gold answer {final!r} is no number")
    return gold


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are off
    return list(parse(text, parsing_timeout=None))
