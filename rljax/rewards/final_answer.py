"""Final answer of a completion, as text: what the model commits to, in the forms that models write.

It stands behind the last </think>, if there is one. It is the number after the last "####" that a
number follows, as in GSM8K's own solutions; else what is in the last \\boxed{} (or \\fbox{}); else
the words of "the answer is Monday."; else what math-verify finds: "the answer is 18", or the last
expression.

No answer are alternatives ("17 or 18"), ranges ("17 to 18"), what is denied ("it isn't 18"), and
sums still to be computed behind four hashes. "About 18", "more than 18" and "\\neq 18" are answers
with a relation: right only for a gold answer with the same one. Of "55/3 \\approx 18.33" the exact
side is the answer. Thin spaces and {,} between groups of three digits mean nothing, 18e3 and "18
thousand" are 18000, and 0.\\overline{3} is a third.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from rljax.rewards.amounts import (
    AMOUNT,
    NUMBER,
    WHOLE,
    Amount,
    amount_of,
    decimal_number,
    leading_amount,
    number_of,
    plain_number,
    words_of,
)

_FULL_WIDTH = "\N{FULLWIDTH EXCLAMATION MARK}\N{FULLWIDTH TILDE}"  # first and last, in the order of ASCII
_ARABIC = {"\N{ARABIC DECIMAL SEPARATOR}": ".", "\N{ARABIC THOUSANDS SEPARATOR}": ","}
_NEGATIVE = re.compile(r"\bnegative\s+(?=[$\d.])", re.IGNORECASE)
_MINUS = "\N{MINUS SIGN}"  # of typeset text; a number begins with a hyphen
_HASHES = re.compile(r"####(?P<line>[^\n]*)")
_LEADING_AMOUNT = re.compile(rf"[\s*_($]*{AMOUNT}")
_ALTERNATIVE = re.compile(rf"\W*(?:(?:or|and|to)\b)?\W*?{AMOUNT}", re.IGNORECASE)  # what may follow "17" in "17 or 18"
_GOES_ON = re.compile(r"\s*(?:[-+*/^×÷±–—]|\\pm)\s*[\d(]|\s?[¼½¾⅓⅔⅕⅛²³]")  # what follows in "9 + 9"
_LAST_ALTERNATIVES = re.compile(rf"(?<![\d.,])(?P<first>{NUMBER})\W*\sor\s+\W*{AMOUNT}\D*\Z", re.IGNORECASE)
_LAST_RANGE = re.compile(rf"(?:\b(?:between|from)\W+{NUMBER}\W+(?:and|to)|\d\s?[–—])\W+(?:{NUMBER})[^\d\n]*\Z", re.IGNORECASE)
_STATED_RANGE = re.compile(rf"\banswer(?:\s+is)?\W*{NUMBER}\W+to\b\W*{NUMBER}[^\d\n]*\Z", re.IGNORECASE)
_LAST_SCALED = re.compile(rf"(?<![\d.,]){AMOUNT}(?<=[a-zKM])(?:\s+[A-Za-z]+){{0,3}}\W*\Z")
_STATED = re.compile(r"\banswer(?:\s+is)?\W*?\s*(?P<text>\(?[A-Za-z][A-Za-z ]*\)?)[.*$]*\s*\Z", re.IGNORECASE)  # "is Monday."
_STATED_BOTH_SIGNS = re.compile(r"\banswer(?:\s+is)?[\s:*$(\\]*?(?P<text>(?:\\pm|±)\s*[^\s$]+?)[\s$*.)]*\Z", re.IGNORECASE)
_LETTER_ALONE = re.compile(r"[\s*$(]*(?P<letter>[A-Z])[)\s*$.]*")  # of a multiple choice
_ANY_AMOUNT = re.compile(rf"(?<![\d.,]){AMOUNT}")
_STATED_NUMBER = re.compile(rf"\banswer(?:\s+is)?[\s:*]*{AMOUNT}(?:\s+[A-Za-z]+)*[\s.*]*\Z", re.IGNORECASE)  # "is 18 dollars."
_AUXILIARY = r"(?:is|are|was|were|does|do|did|can|could|will|would|should|must|has|have)"
_DENIAL = re.compile(  # "is not really 18", "can't be 18"; "does not buy 18" is none
    rf"\b(?:{_AUXILIARY}(?:n['’]t|\s+not|\s+never|\s+no\s+longer)|cannot|can['’]t|won['’]t|not|never|no longer|anything but)"
    rf"(?:\s+(?:be|equal|to|exactly|necessarily|really|simply|just|actually|quite|even|going))*[^\w.]+(?:{NUMBER})",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    rf"{WHOLE}\W*\s(?:is|was)(?:n['’]t|\s+not)?\s+(?:the\s+)?(?:(?:right|correct)\s+)?(?:answer|wrong|incorrect|right|correct)\W*\Z",
    re.IGNORECASE,
)
_LAST = 4000  # characters of a completion in which math-verify looks for an answer; more take it seconds
_LONGEST = 1000  # characters of an answer in a box
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
_WORDS = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z0-9]+)+")  # June 20
_INTRODUCED = re.compile(r"\A\\text\{[^{}]*(?:\bis|=|:)\s*\}")  # \text{The answer is }18
_DOLLARS_AROUND = re.compile(r"\A\$+|(?<!\\)\$+\Z")
_ESCAPED_DOLLAR = re.compile(r"\\\$(?=\s?\d)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_BETWEEN_BOXES = re.compile(r"[\s$,;.]*(?:\\text\{)?\s*(?:and|or)?\s*\}?[\s$,;]*", re.IGNORECASE)
_GROUPS = re.compile(
    r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,\\!|\\[,;:! ]|~|[\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}\N{NO-BREAK SPACE}])\d{3})+(?!\d)"
)
_SPACED_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.])")  # in mathematics, where a space means nothing
_REPEATING = re.compile(r"(?<!\d)(?P<whole>\d*)\.(?P<once>\d*)\\(?:overline|bar|dot)\s*(?:\{(?P<cycle>\d+)\}|(?P<digit>\d))")
_GAP = r"(?:\s|\\[ ,;:!]|~)"
_MIXED = re.compile(  # 1 1/2, 1\frac{1}{2}, 1½
    rf"(?<![\w.,^/])(?<![_^]\{{)(?P<ones>\d{{1,9}})(?:{_GAP}+(?P<above>\d{{1,9}})/(?P<below>\d{{1,9}})(?![\d/.,]*\d)|{_GAP}*(?:"
    r"\\[dt]?frac\s*(?:\{(?P<over>\d{1,9})\}\s*\{(?P<under>\d{1,9})\}|(?P<a>\d)(?P<b>\d))|(?P<glyph>[¼-¾⅐-⅞])))"
)
_POWER_OF_TEN = re.compile(
    r"(?<![\d.^_/])(?P<mantissa>-?\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|×)\s*10\^(?:\{(?P<braced>-?\d{1,3})\}|(?P<digit>\d))"
)
_ABOUT_SIGNS = (r"\\approx", "≈", r"\\sim(?:eq)?", r"\\cong", "~")
_RELATIONS = {
    "≈": (*_ABOUT_SIGNS, "about", "approximately", r"approx\.?", "around", "roughly", "nearly"),
    "≠": (r"\\neq?(?![a-z])", r"\\not\s*=", "≠", "not"),
    "≥": (r"\\geq?(?:slant)?(?![a-z])", "≥", ">=", "at least"),
    "≤": (r"\\leq?(?:slant)?(?![a-z])", "≤", "<=", "at most", "up to"),
    ">": (r"\\gt(?![a-z])", ">", "more than", "greater than", "over"),
    "<": (r"\\lt(?![a-z])", "<", "less than", "fewer than", "under"),
}
_ANY_RELATION = "|".join(f"(?P<r{i}>{'|'.join(forms)})" for i, forms in enumerate(_RELATIONS.values()))
_LEADING_RELATION = re.compile(rf"[\s*_($]*(?:\\text\{{\s*)?(?:{_ANY_RELATION})\s*\}}?", re.IGNORECASE)
_ABOUT = "|".join(form for form in _RELATIONS["≈"])
_LAST_ABOUT = re.compile(rf"(?:\A|[\s$*(])(?:{_ABOUT})[\s$*\\]*{AMOUNT}(?:\s+[A-Za-z]+){{0,4}}\W*\Z", re.IGNORECASE)
_BOTH_SIGNS = re.compile(r"(?:\\?[A-Za-z]\s*=\s*)?(?P<before>[^,;]*?)(?:\\pm(?![A-Za-z])|±)(?P<behind>[^,;±]*)")
_EXACT_SIDE = re.compile(r"\\approx|≈|\\simeq")
_VARIABLE = re.compile(r"\\?[A-Za-z](?:_\{?\w\}?)?")
_TILDE_RANGE = re.compile(rf"(?:{NUMBER})\s*(?:\\sim|~)\s*(?:{NUMBER})")


class Answer(NamedTuple):
    """Answer in a form that math-verify parses.

    Example: Answer("≈", "$18$", "about 18") of "about 18"
    """

    relation: str  # "": equality, the usual one; else one of "≈≠≥≤><"
    text: str
    source: str  # what it was read from
    amount: Amount | None = None  # the number with its unit
    is_amount: bool = False  # whether the amount is the whole answer, not only the last thing said


def final_answer(completion: str) -> Answer | None:
    """Returns what a completion commits to; None if it has no answer."""
    text = normal(completion.rpartition("</think>")[2])  # what was thought before is no answer
    for match in reversed(list(_HASHES.finditer(text))):
        line = match["line"].rpartition("=")[2] if not _LEADING_RELATION.match(match["line"]) else match["line"]
        if relation := _LEADING_RELATION.match(line):
            amount = _LEADING_AMOUNT.match(line, relation.end())
            return _behind_hashes(_name(relation), amount, line) if amount and _ends_there(amount, line) else None
        if re.match(r"[\s*_($]*(?:between|from)\b", line):
            return None
        if "±" in line or "\\pm" in line:
            return boxed(line)
        if amount := _LEADING_AMOUNT.match(line):
            return _behind_hashes("", amount, line) if _ends_there(amount, line) else None
        if amount_of(line, labeled=":" in line):  # "#### Step 18" is a heading
            return boxed(line)
    boxes = last_boxes(text)
    return boxed(", ".join(boxes)) if boxes else _in_words(text)


def boxed(latex: str) -> Answer | None:
    """Returns the answer that LaTeX in a box is; None if it is none.

    Words there are text, and an amount in text is a number.
    """
    latex = _SPACED_GROUPS.sub(lambda match: match[0].replace(" ", ""), _DOLLARS_AROUND.sub("", latex.strip()).strip())
    if len(latex) > _LONGEST:
        return None
    latex = _INTRODUCED.sub("", latex).rstrip(".,;").strip()
    relation, latex = related(latex)
    if _TILDE_RANGE.fullmatch(latex):
        return None
    latex = latex.replace("~", " ")
    text = f"\\boxed{{\\text{{{latex}}}}}" if _WORDS.fullmatch(latex) else f"\\boxed{{{latex}}}"
    amount = amount_of(latex)
    return Answer(relation, text, latex, amount, amount is not None)


def related(latex: str) -> tuple[str, str]:
    """Splits LaTeX into the relation at its beginning, "" for none, and the rest.

    Of `55/3 \\approx 18.33` the rest is the exact side, and \\pm 2 is 2, -2.
    """
    if both := _BOTH_SIGNS.fullmatch(latex):
        before, behind = both["before"].strip(), both["behind"].strip()
        latex = f"{before}+{behind}, {before}-{behind}" if before else f"{behind}, -{behind}"
    if relation := _LEADING_RELATION.match(latex):
        return _name(relation), latex[relation.end() :].strip()
    if about := _EXACT_SIDE.search(latex):
        exact = latex[: about.start()].strip().rstrip("=").strip()
        return ("≈", latex[about.end() :].strip()) if _VARIABLE.fullmatch(exact) else ("", exact)
    return "", latex


def _behind_hashes(relation: str, match: re.Match[str], line: str) -> Answer:
    amount = leading_amount(match, line[match.end() :])
    return Answer(relation, number_of(match), line, amount, True)


def _in_ascii(text: str) -> str:
    """Returns text with full-width forms and the decimal digits of all scripts as ASCII."""
    return "".join(map(_ascii_of, text))


def _ascii_of(character: str) -> str:
    if _FULL_WIDTH[0] <= character <= _FULL_WIDTH[1]:
        return chr(ord(character) - ord(_FULL_WIDTH[0]) + ord("!"))
    return str(unicodedata.decimal(character)) if character.isdecimal() else _ARABIC.get(character, character)


def normal(text: str) -> str:
    """Returns text with its numbers in one spelling.

    Digits are ASCII's, thin spaces are left out, and repeating decimals are fractions.
    """
    text = (text if text.isascii() else _in_ascii(text)).replace(_MINUS, "-")
    text = _NEGATIVE.sub("-", text)
    text = _MIXED.sub(_improper, text)
    text = _GROUPS.sub(lambda match: "".join(re.findall(r"\d+", match[0])), text)
    text = _POWER_OF_TEN.sub(lambda m: decimal_number(f"{m['mantissa']}e{m['braced'] or m['digit']}"), text)
    return _REPEATING.sub(_fraction, text)


def last_boxes(text: str) -> list[str]:
    """Returns what is in the last \\boxed{} that is closed, and in those joined to it by "and".

    Equal ones count once; empty without one.
    """
    found: list[str] = []
    begin = len(text)  # of the box behind
    ends = _closing(text)
    for box in reversed(list(_BOX.finditer(text))):
        end = ends.get(box.end() - 1)
        if end is None or end > begin:  # not closed, or around one that was found: \boxed{\boxed{18}}
            continue
        if found and not _BETWEEN_BOXES.fullmatch(text, end + 1, begin):
            break
        found, begin = [text[box.end() : end].strip(), *found], box.start()
    return list(dict.fromkeys(found))


def _closing(text: str) -> dict[int, int]:
    """Returns where each bracket {} that is closed opens, and where it closes."""
    opened: list[int] = []
    pairs = {}
    for bracket in re.finditer(r"[{}]", text):
        if bracket[0] == "{":
            opened.append(bracket.start())
        elif opened:
            pairs[opened.pop()] = bracket.start()
    return pairs


def _in_words(text: str) -> Answer | None:
    """Returns the answer of a completion without hashes and boxes."""
    if alone := _LETTER_ALONE.fullmatch(text):
        return boxed(alone["letter"])
    kept = _without_denied(text)
    if kept is None or _TAKEN_BACK.search(kept):
        return None
    plain = words_of(kept[-_LAST:])
    if _LAST_RANGE.search(plain) or _STATED_RANGE.search(plain):
        return None
    if stated := _STATED.search(kept) or _STATED_BOTH_SIGNS.search(kept):
        return boxed(stated["text"])
    if about := _LAST_ABOUT.search(kept):
        return Answer("≈", number_of(about), about[0], leading_amount(about, _behind(about)), True)
    if stated := _STATED_NUMBER.search(kept) or _LAST_SCALED.search(kept):
        return Answer("", number_of(stated), stated[0], leading_amount(stated, _behind(stated)), True)
    if (hedge := _LAST_ALTERNATIVES.search(plain)) and plain_number(hedge["number"]) != plain_number(hedge["first"]):
        return None
    last = _SENTENCE.split(kept[-_LAST:].rstrip())[-1]
    amounts = list(_ANY_AMOUNT.finditer(last))
    amount = leading_amount(amounts[0], last[amounts[0].end() :]) if len(amounts) == 1 else None
    return Answer("", _ESCAPED_DOLLAR.sub("", kept[-_LAST:]), last, amount, amount is not None and amount.percent)


def _behind(match: re.Match[str]) -> str:
    """Returns what a match that has an amount has behind it."""
    return match.string[match.end("scale" if match["scale"] else "number") : match.end()]


def _without_denied(text: str) -> str | None:
    """Returns a completion without what its last sentence denies: "not 17, but 18".

    None if nothing is left there.
    """
    text = text.rstrip()
    start = max((match.end() for match in _SENTENCE.finditer(text)), default=0)
    sentence = text[start:]
    denied = list(_DENIAL.finditer(sentence))
    if not denied:
        return text
    before, behind = sentence[: denied[0].start()], sentence[denied[-1].end() :]
    if re.search(r"\d", behind):
        return behind
    return text[:start] + before.rstrip(" ,;") if re.search(r"\d", before) else None


def _ends_there(amount: re.Match[str], line: str) -> bool:
    """Returns False where another number follows as an alternative, or a sum or product goes on."""
    if _GOES_ON.match(line, amount.end()):
        return False
    other = _ALTERNATIVE.match(words_of(line[amount.end() :]))
    return other is None or plain_number(other["number"]) == plain_number(amount["number"])


def _name(relation: re.Match[str]) -> str:
    """Returns the relation whose form was matched."""
    return next(name for i, name in enumerate(_RELATIONS) if relation[f"r{i}"])


def _improper(match: re.Match[str]) -> str:
    """Returns a mixed number as a fraction; a whole number beside another fraction as it is."""
    if glyph := match["glyph"]:
        part = Fraction(unicodedata.numeric(glyph)).limit_denominator(10)
        above, below = part.numerator, part.denominator
    else:
        above, below = int(match["above"] or match["over"] or match["a"]), int(match["below"] or match["under"] or match["b"])
    return f"{int(match['ones']) * below + above}/{below}" if above < below else match[0]


def _fraction(match: re.Match[str]) -> str:
    """Returns a repeating decimal as a fraction."""
    once, cycle = match["once"], match["cycle"] or match["digit"]
    before = int(f"{match['whole']}{once}" or "0")
    numerator = int(f"{match['whole']}{once}{cycle}") - before
    return rf"\frac{{{numerator}}}{{{10 ** len(once) * (10 ** len(cycle) - 1)}}}"
