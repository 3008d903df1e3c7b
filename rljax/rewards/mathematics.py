"""Equality as mathematics: 1 if the completion's final answer equals the gold answer (math-verify).

The final answer is what final_answer.py finds. If the gold answer is a number, it must be a number
too, not an expression: "9 + 9" equals 18, and a policy soon finds that the question equals its
answer. An approximation is right only if the gold answer is one.

A gold answer is LaTeX, with or without dollars, or a number with its unit; of a worked solution its
last box or what is behind its last four hashes. Samples of one that is not understood are rejected.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, NamedTuple

from rljax.errors import Rejected
from rljax.rewards.final_answer import amount_of, escaped, final_answer, last_boxes, normal, related
from rljax.rewards.shapes import reads
from rljax.types import Prompt

_DEEPEST = 12  # brackets that are open at once
_DOLLARS = re.compile(r"\A(\$\$?|\\\(|\\\[)(?P<inner>[^$]+)(\$\$?|\\\)|\\\])\Z", re.DOTALL)
_SOLUTION = re.compile(r"####(?P<line>[^\n]*\d[^\n]*)\s*\Z")  # the last line of GSM8K's solutions


class _Gold(NamedTuple):
    relation: str
    parsed: tuple[Any, ...]  # expressions and text, as math-verify takes them


def _check(field: str) -> Any:
    def check(prompt: Prompt) -> None:
        answer = str(prompt.fields[field])
        if amount_of(normal(answer)) is None:  # a number is mathematics
            _gold(answer)

    return check


@reads("answer", check=_check("answer"))
def reward(prompt: Prompt, completion: str) -> dict[str, float]:
    """Compares with the field `answer`."""
    right = _right(prompt.fields["answer"], completion)
    return {"reward": right, "math": right}


@reads("final", check=_check("final"))
def gsm8k_reward(prompt: Prompt, completion: str) -> dict[str, float]:
    """Compares with the field `final`, which data of type "gsm8k" has."""
    right = _right(prompt.fields["final"], completion)
    return {"reward": right, "gsm8k": right}


def answer_of(completion: str) -> str | None:
    """Returns the final answer in a canonical form, to compare with others; None if there is none."""
    import sympy

    answer = final_answer(completion)
    found = _parse(answer.text) if answer is not None and not answer.relation else []
    if not found:
        return None
    if isinstance(found[0], sympy.Expr) and found[0].is_number:
        return str(sympy.nsimplify(found[0], rational=True))  # 0.5 is 1/2
    return str(found[0])


def _right(answer: Any, completion: str) -> float:
    from math_verify import verify

    try:
        gold = _gold(str(answer))
    except ValueError as error:
        raise Rejected(str(error)) from None
    given = final_answer(completion)
    if given is None or given.relation not in (("≈", "") if gold.relation == "≈" else (gold.relation,)):
        return 0.0
    found = _parse(given.text)
    if _is_worked_out(gold.parsed[0]) and found and not _is_worked_out(found[0]):
        return 0.0
    # No timeouts of its own: they work by SIGALRM, on the main thread only, and count a slow check as a wrong answer.
    # The pool's timeout kills the process instead, and counts a timeout.
    return float(verify(list(gold.parsed), found, timeout_seconds=None))


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


@functools.lru_cache(maxsize=4096)  # the n_samples completions of a prompt share it
def _gold(answer: str) -> _Gold:
    """Parses a gold answer. Raises ValueError if it is not understood."""
    text = normal(answer.strip())
    if boxes := last_boxes(text):
        text = ", ".join(boxes)
    elif solution := _SOLUTION.search(text):
        text = solution["line"].strip()
    elif match := _DOLLARS.match(text):
        text = match["inner"]
    relation, text = related(text)
    number = amount_of(text)
    parsed = _parse(number or f"${escaped(text)}$")
    if number is not None and number.endswith("\\%$"):  # who answers 12.5 to "how many percent" is right
        parsed += _parse(number.replace("\\%", ""))
    if all(isinstance(part, str) for part in parsed):  # text that no expression was made of
        raise ValueError(f"the gold answer {answer!r} is not understood as mathematics")
    return _Gold(relation, tuple(parsed))


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    if _nesting(text) > _DEEPEST:
        return []  # no answer, and seconds to minutes of the parser's time

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are off
    return list(parse(text, parsing_timeout=None))


def _nesting(text: str) -> int:
    """Returns how many brackets of any kind are open at most."""
    open_now = most = 0
    for character in text:
        open_now = max(open_now + (character in "([{") - (character in ")]}"), 0)
        most = max(most, open_now)
    return most
