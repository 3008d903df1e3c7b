"""Equality as mathematics: 1 if the completion's final answer equals the gold answer (math-verify).

The final answer is what follows the last "####" if there is one, as in the data set's own
solutions; else what math-verify finds: the last \\boxed{}, "the answer is ...", or the last
expression. If the gold answer is a number, the final answer must be a number too, not an
expression: "9 + 9" equals 18, and a policy soon finds that the question equals its answer.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from rljax.types import Prompt


def reward(prompt: Prompt, completion: str) -> dict[str, float]:
    """Compares with the field `answer`."""
    right = _right(prompt.fields["answer"], completion)
    return {"reward": right, "math": right}


def gsm8k_reward(prompt: Prompt, completion: str) -> dict[str, float]:
    """Compares with the field `final`, which data of type "gsm8k" has."""
    right = _right(prompt.fields["final"], completion)
    return {"reward": right, "gsm8k": right}


def _right(answer: Any, completion: str) -> float:
    from math_verify import verify

    gold, found = _gold(str(answer)), _parse(_final_part(completion))
    if _is_worked_out(gold[0]) and found and not _is_worked_out(found[0]):
        return 0.0
    # No timeouts of its own: they work by SIGALRM, on the main thread only, and count a slow check as a wrong answer.
    # The pool's timeout kills the process instead, and counts a timeout.
    return float(verify(gold, found, timeout_seconds=None))


def _is_worked_out(expression: Any) -> bool:
    """Returns False for a sum, product or power that is still to be computed.

    Signs, quotients and percentages are part of a number.
    """
    import sympy

    if not isinstance(expression, sympy.Basic):
        return True
    parts = list(sympy.preorder_traversal(expression))
    products = [
        [f for f in part.args if isinstance(f, sympy.Integer | sympy.Float) and abs(f) != 1] for part in parts if part.is_Mul
    ]
    powers = [part for part in parts if part.is_Pow and part.exp != -1]
    return not (powers or any(part.is_Add for part in parts) or any(len(factors) > 1 for factors in products))


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


def answer_of(completion: str) -> str | None:
    """Returns the final answer in a canonical form, to compare with others; None if there is none."""
    import sympy

    found = _parse(_final_part(completion))
    if not found:
        return None
    if isinstance(found[0], sympy.Expr) and found[0].is_number:
        return str(sympy.nsimplify(found[0], rational=True))  # 0.5 is 1/2
    return str(found[0])
