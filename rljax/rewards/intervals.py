"""Inequalities of one variable as intervals: 1 \\le x < 2 is [1, 2)."""

from __future__ import annotations

import re

_SIGNS = (
    (re.compile(r"\\(?:leqslant|leq?)(?![a-z])|≤|<="), "≤"),
    (re.compile(r"\\(?:geqslant|geq?)(?![a-z])|≥|>="), "≥"),
    (re.compile(r"\\lt(?![a-z])"), "<"),
    (re.compile(r"\\gt(?![a-z])"), ">"),
)
_OR = re.compile(r"\\text\{\s*or\s*\}|\\lor(?![a-z])|\\cup(?![a-z])|\bor\b")
_VARIABLE = re.compile(r"[A-Za-z]|\\[a-z]+")
_MIRRORED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


def as_interval(latex: str) -> str | None:
    """Returns an inequality, or several with "or" between, as an interval; None if it is not one."""
    for pattern, sign in _SIGNS:
        latex = pattern.sub(sign, latex)
    parts = [part.strip() for part in _OR.split(latex)]
    intervals = [_interval(part) for part in parts]
    names = {_VARIABLE.fullmatch(side.strip()) and side.strip() for part in parts for side in re.split("[<>≤≥]", part)} - {None}
    if None in intervals or len(names) != 1:
        return None
    return r"\cup".join(filter(None, intervals))


def as_union(latex: str) -> str | None:
    """Returns inequalities with "or" between as a union of intervals; None if it is not that."""
    return as_interval(latex) if _OR.search(latex) else None


def _interval(inequality: str) -> str | None:
    sides = [side.strip() for side in re.split("[<>≤≥]", inequality)]
    signs = re.findall("[<>≤≥]", inequality)
    if not all(sides) or len(sides) not in (2, 3):
        return None
    if signs[0] in ">≥":  # read from right to left
        sides, signs = sides[::-1], [_MIRRORED[sign] for sign in signs[::-1]]
    if not {*signs} <= {"<", "≤"}:
        return None
    if len(sides) == 3 and _VARIABLE.fullmatch(sides[1]):
        return f"{_opening(signs[0])}{sides[0]},{sides[2]}{_closing(signs[1])}"
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[0]):
        return rf"(-\infty,{sides[1]}{_closing(signs[0])}"
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[1]):
        return rf"{_opening(signs[0])}{sides[0]},\infty)"
    return None


def _opening(sign: str) -> str:
    return "[" if sign == "≤" else "("


def _closing(sign: str) -> str:
    return "]" if sign == "≤" else ")"
