"""Equality as mathematics: 1 if the completion's final answer equals the gold answer (math-verify).

The final answer is what final_answer.py finds. If the gold answer is a number, it must be a number
too, not an expression: "9 + 9" equals 18, and a policy soon finds that the question equals its
answer. An approximation is right only if the gold answer is one. 18% is 18 only where the gold
answer is a percentage or the question speaks of percent; else it is 0.18.

Units have to agree where both sides have one that is known (units.py). A base (12_7) may not be
left out. An inequality is right for the interval that it is, and \\pm 2 for 2, -2.

A gold answer is LaTeX, with or without dollars, or a number with its unit; of a worked solution its
last box or what is behind its last four hashes. Samples of one that is not understood are rejected.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any, NamedTuple

from rljax.errors import Rejected
from rljax.rewards import units
from rljax.rewards.amounts import Amount, amount_of, escaped, is_changed, unit_at_end, words_of
from rljax.rewards.final_answer import Answer, final_answer, last_boxes, normal, related
from rljax.rewards.intervals import as_interval, as_union
from rljax.rewards.shapes import reads
from rljax.types import Prompt

_DEEPEST = 12  # brackets that are open at once
_DOLLARS = re.compile(r"\A(\$\$?|\\\(|\\\[)(?P<inner>[^$]+)(\$\$?|\\\)|\\\])\Z", re.DOTALL)
_AT_END = re.compile(r"\$(?P<inner>[^$]+)\$[\s.*]*\Z")
_BASE = re.compile(
    r"(?<![\w.])(?P<digits>\d[\dA-Fa-f,]*)\s*(?:_\s*\{?\s*\(?(?P<sub>\d+)\)?\s*\}?|\W*(?:in\s+)?base[\s-]*(?P<base>\d+))[\s$.)*}]*\Z"
)
_PERCENT = re.compile(r"percent|%|per cent", re.IGNORECASE)
_SOLUTION = re.compile(r"####(?P<line>[^\n]*\d[^\n]*)\s*\Z")  # the last line of GSM8K's solutions


class _Gold(NamedTuple):
    relation: str
    parsed: tuple[Any, ...]  # expressions and text, as math-verify takes them
    amount: Amount | None  # if it is a number with its unit
    unit: units.Unit  # also of an expression
    digits: tuple[str, str] | None  # of a number in a base, and the base


def _check(field: str) -> Any:
    def check(prompt: Prompt) -> None:
        answer = str(prompt.fields[field])
        if amount_of(normal(answer), labeled=False) is None:  # a number is mathematics
            _gold(answer)

    return check


@reads("answer", check=_check("answer"))
def reward(prompt: Prompt, completion: str) -> dict[str, float]:
    """Compares with the field `answer`."""
    right = _right(prompt.fields["answer"], prompt, completion)
    return {"reward": right, "math": right}


@reads("final", check=_check("final"))
def gsm8k_reward(prompt: Prompt, completion: str) -> dict[str, float]:
    """Compares with the field `final`, which data of type "gsm8k" has."""
    right = _right(prompt.fields["final"], prompt, completion)
    return {"reward": right, "gsm8k": right}


def answer_of(completion: str) -> str | None:
    """Returns the final answer in a canonical form, to compare with others; None if there is none."""
    import sympy

    answer = final_answer(completion)
    found = []
    if answer is not None and not answer.relation:
        found = _parse(answer.amount.share if answer.amount and answer.is_amount else answer.text)
    if not found:
        return None
    if isinstance(found[0], sympy.Expr) and found[0].is_number:
        return str(sympy.nsimplify(found[0], rational=True))  # 0.5 is 1/2
    return str(found[0])


def _right(answer: Any, prompt: Prompt, completion: str) -> float:
    try:
        gold = _gold(str(answer))
    except ValueError as error:
        raise Rejected(str(error)) from None
    given = final_answer(completion)
    if given is None or given.relation not in (("≈", "") if gold.relation == "≈" else (gold.relation,)):
        return 0.0
    if given.amount is None and gold.unit.parts and (amount := amount_of(units.spelled(given.source))):  # a bare m
        given = given._replace(amount=amount, is_amount=True)
    if gold.digits is not None:
        return float(_in_base(given.source) == gold.digits)
    if units.differ(gold.unit, _unit_of(given)):
        return 0.0
    return float(any(_equal(gold, text) for text in _readings(gold, given, prompt)))


def _readings(gold: _Gold, given: Answer, prompt: Prompt) -> list[str]:
    """Returns what math-verify compares with the gold answer; empty if nothing can be equal."""
    import sympy

    kind, amount = gold.parsed[0], given.amount
    if isinstance(kind, sympy.Set) and (interval := as_interval(_mathematics(given.source))):
        return [f"${interval}$"]
    if not (isinstance(kind, sympy.Expr) and kind.is_number):
        return [given.text]
    if amount is None:  # "18 or so" in text, which the parser leaves out
        return [] if gold.amount and is_changed(given.source) else [given.text]
    if amount.modifiers and amount.modifiers != (gold.amount.modifiers if gold.amount else ()):
        return []
    if not given.is_amount:
        return [given.text]
    if not amount.percent:
        return [amount.number]
    of_percent = (gold.amount is not None and gold.amount.percent) or _asks_for_percent(prompt)
    return [amount.share, amount.number] if of_percent else [amount.share]


def _equal(gold: _Gold, text: str) -> bool:
    from math_verify import verify

    found = _parse(text)
    if _is_worked_out(gold.parsed[0]) and found and not _is_worked_out(found[0]):
        return False
    # No timeouts of its own: they work by SIGALRM, on the main thread only, and count a slow check as a wrong answer.
    # The pool's timeout kills the process instead, and counts a timeout.
    return bool(verify(list(gold.parsed), found, timeout_seconds=None))


def _unit_of(given: Answer) -> units.Unit:
    return given.amount.unit if given.amount is not None else unit_at_end(given.source)


def _in_base(text: str) -> tuple[str, str] | None:
    """Returns digits and base of 12_7 or "12 in base 7" at the end of a text; None without one."""
    match = _BASE.search(words_of(text))
    return (match["digits"].replace(",", "").lstrip("0").upper(), match["sub"] or match["base"]) if match else None


def _mathematics(source: str) -> str:
    """Returns the formula at the end of a text, or the text as a formula."""
    match = _AT_END.search(source)
    return (match["inner"] if match else source).strip().strip(".*").strip()


def _asks_for_percent(prompt: Prompt) -> bool:
    """Returns whether a question speaks of percent, so that 18% is 18 for it."""
    return any(_PERCENT.search(str(message["content"])) for message in prompt.messages if message["role"] == "user")


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
    amount = amount_of(text, labeled=False)
    parsed = _parse(amount.share if amount else f"${escaped(as_union(text) or text)}$")
    if amount and amount.percent:  # who answers 12.5 to "how many percent" is right
        parsed += _parse(amount.number)
    if all(isinstance(part, str) for part in parsed):  # text that no expression was made of
        raise ValueError(f"the gold answer {answer!r} is not understood as mathematics")
    return _Gold(relation, tuple(parsed), amount, amount.unit if amount else unit_at_end(text), _in_base(text))


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
