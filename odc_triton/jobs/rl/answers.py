"""Final answers of texts, and their comparison: by math_verify, or without it by a small checker.

The checker knows numbers with units, percentages, lists, tuples and intervals, letters and words. There it says what
math_verify says, quirks included (5% is 5, and 12.5% is not 12.5); anything else it leaves open.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

LONGEST = 300  # characters of an answer
_MOST_SAID = 1000  # answers of a text, the last ones
_GAP, _LIST_GAP = 10, 70  # characters between boxes that are one answer, and between those of a list
_LISTED = re.compile(r".*?(?:\b(?:and|or)\b|,|;).*", re.DOTALL)
_SAID = re.compile(r"\banswer(?: is\b|:)[\s:*]*", re.IGNORECASE)
_SENTENCE = re.compile(r"\$([^$\n]*[^$\s\\])\$(?!\d)|\\\((.+?)\\\)|(.*?)(?:\.(?:\s|$)|\*\*|\n|$)")
_UNITS = "cm|mm|km|m|kg|g|ft|feet|inch|mile|meter|liter|hour|minute|min|second|day|month|year|degree|unit|square|acre"
_UNITS += "|gallon|pound|lb|mph|cent|coin|student|apple|pm|am"
_REPLACED = (  # what does not change a value
    (r"\\!\s*|\\\$|\$|[\"']|\\displaystyle|\\(?:left|right)(?=[\[(\])]|\\[{}])", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\s*\{\s*,\s*\}|(?<![a-zA-Z]),?\s*(?:and|or)(?![a-zA-Z])", ","),
    (r"\\text\{percent(?:age)?\}|\s*\bpercent(?:age)?\b", "%"),
    (r"(?:(?<=[\d%)\]])|(?<=\d\}))\s*\\(?:text\w*|math(?:rm|bf|it)|mbox)\{[^{}]*\}(?:\^\d)?$", ""),
    (r"(?<=\d)\s*\^\s*(?:\\circ|\{\\circ\})$", ""),
    *[(rf"(?<=[\d}}\s])\s*(?:{_UNITS})(?:s|es)?\s*$", "")] * 2,
)
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<whole>\d*)\\frac\{(?P<above>-?\d+)\}\{(?P<below>\d+)\}|(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    r"|(?P<decimal>\d*\.\d+|\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+)\s*(?P<percent>\\?%)?)"
)
_DIGIT = re.compile(r"\d")
_WORDS = re.compile(r"(?:\\text\w*\{)?\(?([A-Za-z][A-Za-z ]*)\)?\}?")
# Words that are values, and what math_verify takes in references and not in answers.
_ODD = re.compile(
    r"(?<!\\)(?:inf|sqrt)|pct|nan|zoo|\\(?:frac|sqrt|log_)\s?\d|\^\s?\(|/\s*0|\{0\}|\\approx|_", re.IGNORECASE
)


class _Number(NamedTuple):
    value: Fraction
    is_float: bool = False
    percent: Fraction | None = None  # the whole number before a percent sign

    def equals(self, other: _Number) -> bool:
        wholes = [not each.is_float and each.value.denominator == 1 for each in (self, other)]
        counts = [each.value if each.percent is None else each.percent for each in (self, other)]
        if all(is_whole or each.percent for is_whole, each in zip(wholes, (self, other), strict=True)):
            return self.value == other.value or counts[0] == counts[1]
        is_rounded = (self.is_float or other.is_float) and not any(wholes)
        return self.value == other.value or (is_rounded and round(self.value, 6) == round(other.value, 6))


class _Several(NamedTuple):
    brackets: str  # "": a set
    numbers: list[_Number]


def final_answer(text: str) -> str | None:
    r"""What a text gives as its answer: in its last \boxed{}, after its last ####, or after "answer is" or "answer:";
    the last of these with a number in it. What follows </think> counts first. None: it gives none.
    """
    for part in (text.rpartition("</think>")[2], text):
        if boxed := _boxed(part):
            return boxed
        _, mark, rest = part.rpartition("####")
        said = (part[each.end() : each.end() + 4 * LONGEST] for each in reversed([*_SAID.finditer(part)][-_MOST_SAID:]))
        texts = [rest if mark else "", *said]
        numbers = filter(_DIGIT.search, map(_sentence, filter(_DIGIT.search, texts)))
        # A heading, or "this answer is right", has no number.
        if answer := next(numbers, "") or next(filter(None, map(_sentence, texts)), ""):
            return answer
    return None


def _sentence(text: str) -> str:
    """What a text begins with: a formula between dollars, or up to the end of a sentence."""
    found = _SENTENCE.match(text.lstrip(" *\t\n")[: 2 * LONGEST])
    return next((each.strip(" *") for each in found.groups() if each), "") if found else ""


def _boxed(text: str) -> str:
    """The content of the last box; of several that are a list, separated by commas, as math_verify has it."""
    found: list[str] = []
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        first, last, depth = start + 7, start + 7, 1
        while last < end and (depth := depth + {"{": 1, "}": -1}.get(text[last], 0)):
            last += 1
        if last == end:  # it never ends
            return ",".join(reversed(found)) or text[first : first + 2 * LONGEST]
        content, between = text[first:last].strip(), text[last + 1 : end]
        is_repeated = found[-1:] == [content]
        is_apart = is_repeated or len(between) >= _LIST_GAP or not _LISTED.fullmatch(between)
        if found and len(between) >= _GAP and is_apart:
            break
        found += [] if is_repeated else [content]
        end = start
    return ",".join(reversed(found))


def same_answer(reference: str, answer: str) -> bool | None:
    """True if the two are equal; None: this can't tell, and math_verify may."""
    if reference.strip() == answer.strip() and not _ODD.search(reference):
        return True
    one, other = _value(reference), _value(answer)
    if one is None or other is None or ("=" in reference and "=" in answer):
        return None
    if isinstance(one, _Number) and isinstance(other, _Number):
        return one.equals(other)
    if isinstance(one, str) and isinstance(other, str):  # products of letters to math_verify
        return (len(one) == 1 or None) if one == other else None if sorted(one) == sorted(other) else False
    if not (isinstance(one, _Several) and isinstance(other, _Several)) or len(one.numbers) != len(other.numbers):
        return False
    if bool(one.brackets) != bool(other.brackets):
        return None
    return one.brackets == other.brackets and all(map(_Number.equals, one.numbers, other.numbers))


def can_be_read(reference: str) -> bool:
    """True if `same_answer` can tell it from other texts."""
    return _value(reference) is not None


def _value(text: str) -> _Number | _Several | str | None:
    if len(text) > LONGEST:
        return None
    for pattern, by in _REPLACED:
        text = re.sub(pattern, by, text.strip())
    if assigned := re.fullmatch(r"[a-zA-Z]\s*=([^,%]*)", text.strip()):
        return _number(assigned[1])
    if _NUMBER.fullmatch(text := text.strip()):
        return _number(text)
    if (words := _WORDS.fullmatch(text)) and not _ODD.search(text):
        return words[1].replace(" ", "").lower()
    brackets, inner = "", text
    if text[:2] + text[-2:] == "\\{\\}":
        inner = text[2:-2]
    elif text[:1] + text[-1:] in ("()", "[]", "(]", "[)"):
        brackets, inner = text[0] + text[-1], text[1:-1]
    numbers = [number for each in inner.split(",") if (number := _number(each)) is not None]
    if len(numbers) <= inner.count(",") or "%" in inner:
        return None
    if not brackets:
        numbers = sorted({each.value: each for each in numbers}.values(), key=lambda each: each.value)
    elif brackets != "()" and not (len(numbers) == 2 and numbers[0].value < numbers[1].value):  # no interval
        return None
    return _Several(brackets, numbers) if len(numbers) > 1 else numbers[0]


def _number(text: str) -> _Number | None:
    if (found := _NUMBER.fullmatch(text.strip())) is None:
        return None
    sign = -1 if found["sign"] == "-" else 1
    if (decimal := found["decimal"]) is None:
        above, below = int(found["above"] or found["over"]), int(found["below"] or found["under"])
        known = below and not (found["whole"] and above < 0)
        return _Number(sign * (int(found["whole"] or 0) + Fraction(above, below))) if known else None
    value, is_float = sign * Fraction(decimal.replace(",", "")), "." in decimal
    if found["percent"] is None:
        return _Number(value, is_float)
    return _Number(value / 100, is_float, None if is_float or found["sign"] else value)
