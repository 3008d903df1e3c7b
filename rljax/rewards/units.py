"""Units of measure and the words around a number: which are a unit, and which make another number.

    unit_of("km/h") == unit_of("kilometres per hour"); differ(unit_of("cm"), unit_of("m"))

Two units differ only where both are known: what is counted (apples), and a number without a unit,
fit every unit. Nothing is converted: 50 mm is another answer than 5 cm.

Whether a word may stand at a number is decided by its form, not by a list of nouns: it has a vowel
and three letters or more, and is none of those that change the number (dozen, half, or).
"""

from __future__ import annotations

import re
from typing import NamedTuple


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SPELLINGS = {
    "meter": "metre",
    "millimeter": "millimetre mm",
    "centimeter": "centimetre cm",
    "kilometer": "kilometre km",
    "inch": "in",
    "foot": "feet ft",
    "yard": "yd",
    "mile": "mi",
    "gram": "gramme",
    "milligram": "mg",
    "kilogram": "kg kilo kilogramme",
    "ton": "tonne",
    "ounce": "oz",
    "pound": "lb £ gbp",  # of mass or of money: the word doesn't tell
    "liter": "litre",
    "milliliter": "millilitre ml",
    "gallon": "gal",
    "quart": "qt",
    "pint": "pt",
    "cup": "",
    "second": "sec",
    "millisecond": "ms",
    "minute": "min",
    "hour": "hr",
    "day": "",
    "week": "wk",
    "month": "",
    "year": "yr",
    "dollar": "$ usd buck",
    "cent": "¢",
    "euro": "€ eur",
    "yen": "¥ jpy",
    "degree": "deg",
    "degree celsius": "celsius",
    "degree fahrenheit": "fahrenheit",
    "radian": "rad",
    "newton": "",
    "joule": "",
    "watt": "",
    "kilowatt": "kw",
    "volt": "",
    "ampere": "amp",
    "kelvin": "",
    "before noon": "am",
    "after noon": "pm",
}
_NAMES = {spelling: name for name, others in _SPELLINGS.items() for spelling in (name, *others.split())}
_LETTERS = {  # a unit in text only: in mathematics a letter is a variable
    "m": "meter", "g": "gram", "s": "second", "h": "hour", "l": "liter", "L": "liter", "N": "newton", "J": "joule",
    "W": "watt", "V": "volt", "A": "ampere", "K": "kelvin", "C": "celsius", "F": "fahrenheit",
}  # fmt: skip
_RATES = {rate: "kilometer per hour" for rate in ("kph", "kmh", "kmph")} | {"mph": "mile per hour"}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_PER = frozenset(("per", "/", "a", "an", "each", "every"))
MODIFIERS = _set(  # 18 with one of these is another number, or more than one
    "hundred thousand million billion trillion dozen dozens half halves squared cubed doubled tripled halved "
    "factorial plus minus or"
)
_NUMERALS = _set(
    "zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety "
    "negative twice thrice double triple"
)
_NO_UNIT = _NUMERALS | _set(  # a text with one of these says more than an amount
    "to not no never nor neither is isn was wasn are than least most about around roughly approximately almost nearly over "
    "under below divided mod modulo root sqrt log exp sin cos tan alpha beta gamma delta theta lambda sigma omega infinity"
)
_FUNCTION_WORDS = _set("a an of in on at by for it we he me my his her its us")
_CODES = re.compile(r"CHF|RMB|CNY|INR|GBP|JPY|PKR|HKD|SGD|NZD|kWh|hrs|pts|rs", re.IGNORECASE)  # without a vowel
_PRODUCT = re.compile(r"[abcd]+|[u-z]+", re.IGNORECASE)  # of variables
_WORD = re.compile(r"[^\W\d_](?:['’-]?[^\W\d_])*")
_TOKEN = re.compile(rf"{_WORD.pattern}|[$€£¥¢/]|\^\{{?\d\}}?")
_RATE = re.compile(r"(?<![A-Za-z])([A-Za-z]+)\s*/\s*([A-Za-z]+)(?![A-Za-z])")
_SINGLE = re.compile(r"(?<![\w'’\\-])[A-Za-z](?![\w'’-])")
_RAISED = re.compile(r"(?<=[A-Za-z])\s?\^\{?[23]\}?")  # cm^2
_POWER_BEHIND = re.compile(r"(?<=[A-Za-z])\s+(squared|cubed)\b")
_AND_A = re.compile(r"\band\s+(?:an?|one)\s")  # third; but "18 third graders"
_NOON = re.compile(r"\b([ap])\.\s?m\b\.?")


class Unit(NamedTuple):
    """Known units at the beginning of a text, each with its power.

    Example: Unit((("kilometer", 1), ("hour", -1)), True) of "km/h"
    """

    parts: tuple[tuple[str, int], ...] = ()
    whole: bool = True  # False if there is more behind them that is not known


def unit_of(words: str) -> Unit:
    """Returns the unit with which text begins; one without parts if it is not known."""
    tokens = _TOKEN.findall(spelled(words))
    parts: list[tuple[str, int]] = []
    power = sign = 1
    for i, token in enumerate(tokens):
        lower = token.lower()
        if exponent := re.search(r"\d", token):
            parts[-1:] = [(name, power * int(exponent[0])) for name, power in parts[-1:]]
        elif lower in _PER and parts:
            sign = -1
        elif lower in _POWERS:
            power = _POWERS[lower]
        elif (name := _name(lower)) and not (lower == "in" and i + 1 < len(tokens) and _WORD.match(tokens[i + 1])):
            if parts and name.startswith(parts[-1][0]) and sign == 1:  # degrees Celsius
                parts.pop()
            parts.append((name, sign * power))
            power = sign = 1
        else:
            return Unit(tuple(parts), False)
    return Unit(tuple(parts))


def differ(one: Unit, other: Unit) -> bool:
    """Returns whether both units are known, and are not the same."""
    if not one.parts or not other.parts:
        return False
    if one.whole and other.whole and len(one.parts) != len(other.parts):
        return True
    return any(
        p != q or not (a.startswith(b) or b.startswith(a)) for (a, p), (b, q) in zip(one.parts, other.parts, strict=False)
    )


def spelled(words: str) -> str:
    """Returns text with units of one letter, rates and powers spelled out, as "meter per second"."""
    words = spelled_rates(_NOON.sub(r"\1m", words))
    return _SINGLE.sub(lambda match: _LETTERS.get(match[0], match[0]), words)


def are_words(text: str) -> bool:
    """Returns whether text is words and currency signs that leave a number as it is, or empty."""
    words = re.sub(r"[$€£¥¢\s/(),.]", " ", _RAISED.sub(" ", text)).split()
    return all(_is_word(word) for word in words) and words[-1:] not in (["a"], ["an"])


def modifiers(text: str) -> tuple[str, ...]:
    """Returns the words of a text that make another number of the one before, sorted."""
    lower = text.lower()
    part = {"and"} if _AND_A.search(lower) else set()
    return tuple(sorted(part | set(re.findall(r"(?<![\w-])[a-z]+(?![\w-])", lower)) & MODIFIERS))


def spelled_rates(words: str) -> str:
    """Returns text or mathematics with rates and powers of units spelled out."""
    words = words.replace("²", "^2").replace("³", "^3")
    words = _POWER_BEHIND.sub(lambda match: f"^{_POWERS[match[1]]}", words)

    def per(match: re.Match[str]) -> str:
        names = [_LETTERS.get(part) or _name(part.lower()) for part in match.groups()]
        return " per ".join(filter(None, names)) if all(names) else match[0]

    words = re.sub(rf"\b(?:{'|'.join(_RATES)})\b", lambda match: _RATES[match[0].lower()], words, flags=re.IGNORECASE)
    return _RATE.sub(per, words)


def is_product(word: str) -> bool:
    """Returns whether a word behind a number is a variable, or a product of some: x, ab, xyz."""
    single = len(word) == 1 and word not in _LETTERS and word not in "aI"
    return single or word == "pi" or re.fullmatch(r"[abcd]{2}|[u-z]{2,3}", word) is not None


def is_known(word: str) -> bool:
    """Returns whether a word is the name or a spelling of a unit that the table has."""
    return _name(word.lower()) is not None


def _name(lower: str) -> str | None:
    """Returns the name of a unit by a spelling, its plural included."""
    return next((_NAMES[each] for each in (lower, lower.removesuffix("s"), lower.removesuffix("es")) if each in _NAMES), None)


def _is_word(word: str) -> bool:
    lower = word.lower()
    stem = re.split(r"['’]", lower)[0]  # isn't
    if not _WORD.fullmatch(word) or {*stem.split("-")} <= MODIFIERS | _NO_UNIT:  # half-dozen; but half-full
        return False
    if _name(lower) or lower in _FUNCTION_WORDS or lower in _POWERS or _CODES.fullmatch(word):
        return True
    letters = re.sub(r"['’-]", "", word)
    has_vowel = re.search(r"[^b-df-hj-np-tv-xz]", letters.lower()) is not None  # y is one, and é
    return len(letters) > 2 and not _PRODUCT.fullmatch(letters) and (has_vowel or len(letters) > 4)
