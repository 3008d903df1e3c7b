"""Equality as mathematics: 1 if the completion's final answer equals the gold answer (math-verify).

The final answer stands behind the last </think>, if there is one. It is the number after the last
"####" that a number follows, as in GSM8K's own solutions; else what is in the last \\boxed{}; else
the words of "the answer is Monday."; else what math-verify finds: "the answer is 18", or the last
expression. Alternatives ("17 or 18") are no answer. If the gold answer is a number, the final
answer must be a number too, not an expression: "9 + 9" equals 18, and a policy soon finds that the
question equals its answer.

A gold answer is LaTeX, with or without dollars, or a number with its unit. Samples of one that is
not understood are rejected.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from rljax.errors import Rejected
from rljax.rewards.shapes import reads
from rljax.types import Prompt

_MINUS = "\N{MINUS SIGN}"  # of typeset text; a number begins with a hyphen
_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?(?:\s?\\?%)?"
_AMOUNT = rf"(?P<sign>[-+]?)\s?(?:(?:[A-Z]{{1,3}})?\s?\\?[$€£¥])?\s?(?P<number>{_NUMBER})"  # US$18, -$18
_HASHES = re.compile(r"####(?P<line>[^\n]*)")
_LEADING_AMOUNT = re.compile(rf"[\s*_($]*{_AMOUNT}")
_ALTERNATIVE = re.compile(rf"\W*(?:(?:or|and|to)\b)?\W*?{_AMOUNT}", re.IGNORECASE)  # what may follow "17" in "17 or 18"
_GOES_ON = re.compile(r"\s*[-+*/^×÷]\s*[\d(]")  # what follows in "9 + 9"
_LAST_ALTERNATIVES = re.compile(rf"(?P<first>{_NUMBER})\W*\sor\s+\W*{_AMOUNT}\D*\Z", re.IGNORECASE)
_NEGATED = re.compile(rf"(?:\A|[.\n])[^\d.\n]*\bnot\s+\W*{_AMOUNT}\W*\Z", re.IGNORECASE)  # "it is not 18."
_STATED = re.compile(r"\banswer(?:\s+is)?\W*?\s*(?P<text>\(?[A-Za-z][A-Za-z ]*\)?)[.*]*\s*\Z", re.IGNORECASE)  # "is Monday."
_STATED_NUMBER = re.compile(rf"\banswer(?:\s+is)?[\s:*]*{_AMOUNT}(?:\s+[A-Za-z]+)*[\s.*]*\Z", re.IGNORECASE)  # "is 18 dollars."
_WORDS = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z0-9]+)+")  # June 20
_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\{(?P<inner>[^{}]*)\}")
_ESCAPED_DOLLAR = re.compile(r"\\\$(?=\s?\d)")
_WITH_UNIT = re.compile(rf"{_AMOUNT}(?:\s+[A-Za-z]{{2,}}\.?)*")  # 18 dollars
_DEEPEST = 12  # brackets that are open at once
_DOLLARS = re.compile(r"\A(\$\$?|\\\(|\\\[)(?P<inner>[^$]+)(\$\$?|\\\)|\\\])\Z", re.DOTALL)


def _check(field: str) -> Any:
    def check(prompt: Prompt) -> None:
        answer = str(prompt.fields[field])
        if not _WITH_UNIT.fullmatch(answer.strip()):  # a number is mathematics
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

    found = _final_answer(completion)
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
    found = _final_answer(completion)
    if _is_worked_out(gold[0]) and found and not _is_worked_out(found[0]):
        return 0.0
    # No timeouts of its own: they work by SIGALRM, on the main thread only, and count a slow check as a wrong answer.
    # The pool's timeout kills the process instead, and counts a timeout.
    return float(verify(list(gold), found, timeout_seconds=None))


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


def _final_answer(completion: str) -> list[Any]:
    """Returns the final answer of a completion, parsed; nothing if it has none."""
    completion = completion.rpartition("</think>")[2].replace(_MINUS, "-")  # what was thought before is no answer
    for match in reversed(list(_HASHES.finditer(completion))):
        line = match["line"].rpartition("=")[2]
        if amount := _LEADING_AMOUNT.match(line):
            return _parse_number(amount) if _ends_there(amount, line) else []
    box = _last_box(completion)
    if box is not None:
        return _parse_box(box.strip())
    if stated := _STATED.search(completion):
        return _parse_box(stated["text"].strip())
    if amount := _STATED_NUMBER.search(completion):
        return _parse_number(amount)
    if _NEGATED.search(completion):
        return []
    if (hedge := _LAST_ALTERNATIVES.search(completion)) and _plain(hedge["number"]) != _plain(hedge["first"]):
        return []
    return _parse(_ESCAPED_DOLLAR.sub("", completion))


def _parse_box(box: str) -> list[Any]:
    """Parses what is in a box; words there are text, and an amount in text is a number."""
    if (text := _TEXT.fullmatch(box)) and (amount := _WITH_UNIT.fullmatch(text["inner"].strip())):
        return _parse_number(amount)
    return _parse(f"\\boxed{{\\text{{{box}}}}}" if _WORDS.fullmatch(box) else f"\\boxed{{{box}}}")


def _ends_there(amount: re.Match[str], line: str) -> bool:
    """Returns False where another number follows as an alternative, or a sum or product goes on."""
    if _GOES_ON.match(line, amount.end()):
        return False
    other = _ALTERNATIVE.match(line, amount.end())
    return other is None or _plain(other["number"]) == _plain(amount["number"])


def _plain(number: str) -> str:
    return number.replace(",", "").lstrip("+")


def _parse_number(amount: re.Match[str]) -> list[Any]:
    sign = "-" if amount["sign"] == "-" else ""
    number = sign + _plain(amount["number"])
    return _parse(f"${_escaped(number)}$")


def _last_box(text: str) -> str | None:
    """Returns what is in the last \\boxed{} that is closed; None without one."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for position in range(start + len("\\boxed"), len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : position]
        end = start
    return None


@functools.lru_cache(maxsize=4096)  # the n_samples completions of a prompt share it
def _gold(answer: str) -> tuple[Any, ...]:
    """Parses a gold answer. Raises ValueError if it is not understood."""
    text = answer.strip().replace(_MINUS, "-")
    if (box := _last_box(text)) is not None:
        text = box
    elif match := _DOLLARS.match(text):
        text = match["inner"]
    amount = _WITH_UNIT.fullmatch(text)
    gold = _parse_number(amount) if amount else _parse(f"${_escaped(text)}$")
    if amount and amount["number"].endswith("%"):  # who answers 12.5 to "how many percent" is right
        gold += _parse(f"${amount['sign']}{amount['number'].rstrip(' %').rstrip(chr(92))}$")
    if all(isinstance(part, str) for part in gold):  # text that no expression was made of
        raise ValueError(f"the gold answer {answer!r} is not understood as mathematics")
    return tuple(gold)


def _escaped(latex: str) -> str:
    """Escapes percent signs, with which a comment would begin."""
    return re.sub(r"(?<!\\)%", r"\\%", latex)


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
