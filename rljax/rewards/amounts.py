"""Amounts: a number with the words around it that leave it as it is.

    amount_of("USD 18"), amount_of("18~\\\\text{dollars per day}"), amount_of("Total: 18")

In text a letter may be a unit (18\\\\text{ m}); in mathematics it is a variable (18m), and 18m no
amount. Neither are "18 or 19" and "18 and a half". "18 dozen" is the amount 18 of "dozen", which
only an equal one is equal to, and 18% is the amount 18 with a percent sign.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from rljax.rewards import units

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "k": 3, "m": 6}  # powers of ten
_DIGITS = r"(?>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = rf"(?>{_DIGITS}(?:[eE][-+]?\d{{1,3}}\b|/\d+)?(?:\s?\\?%)?|\\[dt]?frac\{{\d+\}}\{{\d+\}})"
WHOLE = rf"(?<![\d.,]){NUMBER}"  # not the end of one
_SCALE = r"(?:\s*(?P<scale>(?i:hundred|thousand|million|billion|trillion)\b|(?<=\d)[kKM]\b))?"  # 18k, but 18 km
AMOUNT = rf"(?P<sign>[-+]?)\s?(?:(?:[A-Z]{{1,3}})?\s?\\?[$€£¥])?\s?(?P<number>{NUMBER}){_SCALE}"  # US$18, -$18
_LONGEST = 200  # characters of an amount
_FIRST = re.compile(rf"(?<![\d.,]){AMOUNT}")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{(?P<inner>[^{}]*)\}")
_TEXT_AT_END = re.compile(r"(?:\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?[\s/$.*]*)+\Z")
_WITH_WORD = re.compile(rf"{AMOUNT}\s*(?P<word>[A-Za-z]+)")
_SPACES = re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\\circ\})|\\degree(?![A-Za-z])|°")
_SCALE_OF_DEGREES = re.compile(r"(?<=degrees) +([CF])\b")
_LABEL = re.compile(r"(?P<words>.*?)\s*(?P<mark>[:=]|\b(?:is|are|was|equals)\b)?\s*(?:[A-Z]{2,3}|Rs)?\.?\s*[$€£¥]?\s*")
_CURRENCY = re.compile(r"\s*(?:(?:[A-Z]{2,3}|Rs)\.?)?\s*[$€£¥]?\s*")
_PERCENT = re.compile(r"\s*(?:\\?%|percent(?:age)?(?:\s+points?)?\b|per\s+cent\b)", re.IGNORECASE)
_NEXT_WORD = re.compile(r"\s*(?!or\s+\W*\d)((?:and\s+(?:an?|one)\s+)?[A-Za-z]+)(?![\w-])", re.IGNORECASE)
_RAISED = re.compile(r"\s?\^")
_GLUED = re.compile(r"[^\W\d_]+")  # to the number, without a space


class Amount(NamedTuple):
    """A number with its unit.

    Example: Amount("$18$", False, Unit((("dollar", 1),), True), ()) of "18 dollars"
    """

    number: str  # LaTeX; that of a percentage is what stands before the sign
    percent: bool
    unit: units.Unit
    modifiers: tuple[str, ...]  # words that make another number of it

    @property
    def share(self) -> str:
        """The number as LaTeX, a percentage as a fraction."""
        number = self.number.strip("$")
        if not self.percent or not re.fullmatch(r"-?[\d.]+(?:/\d+)?", number):
            return self.number
        share = Fraction(number.partition("/")[0]) / int(number.partition("/")[2] or 1) / 100
        return rf"${'-' if share < 0 else ''}\frac{{{abs(share.numerator)}}}{{{share.denominator}}}$"


def amount_of(latex: str, labeled: bool = True) -> Amount | None:
    """Returns the amount that LaTeX or text is; None if it is not one, or more than one.

    Args:
      labeled: whether there may be words before the number ("Total: 18", "Page 18").
    """
    plain = words_of(latex)
    first = _FIRST.search(plain)
    if first is None or len(plain) > _LONGEST or (first["scale"] and not has_word_scale(first)):
        return None
    before, behind = plain[: first.start()], plain[first.end() :]
    if not (_CURRENCY.fullmatch(before) or (labeled and _is_label(before, first))):
        return None
    percent, behind = _percent(first, behind)
    behind = re.sub(r"\A-(?=[A-Za-z])", " ", behind)  # 18-inch
    modifiers = units.modifiers(behind)
    others = re.sub(rf"(?i)\b(?:{'|'.join(modifiers)})\b", " ", behind) if modifiers else behind
    if "or" in modifiers or _is_glued(behind) or not units.are_words(others.replace(" a ", " ") if modifiers else others):
        return None
    unit = units.unit_of(behind)
    return Amount(bare_number(first), percent, unit if behind.strip() else units.unit_of(before + first[0]), modifiers)


def leading_amount(match: re.Match[str], behind: str) -> Amount:
    """Returns the amount of a match of AMOUNT in running text, which goes on behind its unit."""
    percent, behind = _percent(match, units.spelled(words_of(behind)))
    raised, word = _RAISED.match(behind), _NEXT_WORD.match(behind)
    unit = units.unit_of(behind)
    if not unit.parts:
        unit = units.unit_of(re.sub(r"[^$€£¥]", "", match[0]))
    return Amount(bare_number(match), percent, unit, (raised[0].strip(),) if raised else _changed_by(word[1]) if word else ())


def _changed_by(word: str) -> tuple[str, ...]:
    return (word,) if units.is_product(word) else units.modifiers(word)


def _percent(match: re.Match[str], behind: str) -> tuple[bool, str]:
    """Returns whether an amount is a percentage, and what is behind it."""
    percent = _PERCENT.match(behind)
    return bool(percent) or "%" in match["number"], behind[percent.end() :] if percent else behind


def _is_label(before: str, first: re.Match[str]) -> bool:
    """Returns whether words before a number name it, and are no part of it."""
    label = _LABEL.fullmatch(before)
    if label is None or (first["sign"] and not label["mark"]):  # Total - 18
        return False
    words = label["words"].strip()
    if not label["mark"] and before[-1:].isalpha() and not first[0][0].isspace():  # x18
        return False
    return bool(label["mark"] == "=" and re.fullmatch(r"\\?[A-Za-z]", words)) or (
        units.are_words(words) and not units.modifiers(words)
    )


def _is_glued(behind: str) -> bool:
    """Returns whether letters at a number may be variables (18xy) or an ending (18th)."""
    glued = _GLUED.match(behind)
    return glued is not None and len(glued[0]) < 4 and not units.is_known(glued[0])


def words_of(latex: str) -> str:
    """Returns LaTeX with its text, spaces and degrees as plain text; units in text are spelled out."""
    plain = _TEXT.sub(lambda match: f" {units.spelled(match['inner'])} ", latex.replace("\\$", "$"))
    plain = units.spelled_rates(_DEGREES.sub(" degrees ", _SPACES.sub(" ", plain)))
    return _SCALE_OF_DEGREES.sub(lambda match: {"C": " celsius", "F": " fahrenheit"}[match[1]], plain).strip()


def has_text(latex: str) -> bool:
    """Returns whether there is text with letters in LaTeX."""
    return any(re.search(r"[A-Za-z]", match["inner"]) for match in _TEXT.finditer(latex))


def is_changed(latex: str) -> bool:
    """Returns whether LaTeX that is no amount begins with a number that text or variables change."""
    match = _WITH_WORD.match(words_of(latex))
    return match is not None and (has_text(latex) or units.is_product(match["word"]))


def unit_at_end(latex: str) -> units.Unit:
    """Returns the unit that an expression has as text behind it; one without parts if it has none."""
    match = _TEXT_AT_END.search(latex)
    return units.unit_of(words_of(match[0])) if match else units.Unit()


def number_of(amount: re.Match[str]) -> str:
    """Returns the number of a match of AMOUNT as LaTeX, its power of ten written out."""
    sign = "-" if amount["sign"] == "-" else ""
    number, scale = plain_number(amount["number"]), amount["scale"]
    if scale and re.fullmatch(r"[\d.]+", number):
        number = f"{number}e{_SCALES[scale.lower()]}"
    return f"${sign}{escaped(decimal_number(number))}$"


def bare_number(amount: re.Match[str]) -> str:
    """Returns the number of a match of AMOUNT as LaTeX, without its percent sign."""
    return re.sub(r"\s?\\%", "", number_of(amount))


def plain_number(number: str) -> str:
    """Returns a number without commas and a plus sign."""
    return number.replace(",", "").lstrip("+")


def decimal_number(number: str) -> str:
    """Returns 18e3 as 18000; other numbers as they are."""
    return f"{Decimal(number):f}" if "e" in number.lower() and re.fullmatch(r"-?[\d.]+[eE][-+]?\d+", number) else number


def has_word_scale(amount: re.Match[str]) -> bool:
    """Returns whether the power of ten of an amount is a word, not a letter."""
    return amount["scale"] is not None and len(amount["scale"]) > 1


def escaped(latex: str) -> str:
    """Escapes percent signs, with which a comment would begin."""
    return re.sub(r"(?<!\\)%", r"\\%", latex)
