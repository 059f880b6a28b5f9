"""Checks that measured numbers in the pages equal their files: `python -m docs.figures.marks`.

A measured number is followed by a mark: a comment with a file of bench/results or docs/figures, and a key. A range with
two decimals must have one, except in code. In a name of a key `*` is any text.

    1.57<!--demo.json:speedup_split_vs_fsdp2/ratio-->              rounded as the text is
    1.57 (1.50 to 1.65)<!--demo.json:speedup_split_vs_fsdp2-->     ratio, low, high; or `1.50 to 1.65` alone
    15%<!--end_to_end.json:mean(cells/equal/idle_fraction)-->      times 100; mean, median, min, max, sum of a list
    10.1<!--exact.json:parameters *1e-6--> M                       times a scale
    2.1<!--a.json:min(rows/way=DDP&ranks=8/s // rows/way=ODC&ranks=8/s)-->    quotients; rows by number, `*`, values
    8.07<!--not recorded: by commit ee632c6--> GB
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"^(`{3,}).*?^\1`*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!--(\S.*?)-->", re.DOTALL)
_NUMBER = r"((?:(?<!\w)[-–−])?(?<![\w.,])\d[\d,]*(?:\.\d+)?)"
_SINGLE = re.compile(rf"{_NUMBER} ?[%x]?\**$")
_INTERVAL = re.compile(rf"(?:{_NUMBER}\**(?: times)? \()?(?:95% interval )?{_NUMBER} to {_NUMBER}\)?\**$")
_UNMARKED = re.compile(r"\d\.\d\d+\s+to\s+\d+\.\d\d+(?![\d.]*\)?\**<!--)")
_KEY = re.compile(r"(?:(mean|median|min|max|sum)\((.*)\)|(.*?))(?: \*([\d.e+-]+))?")
_CALLS = {"mean": mean, "median": median, "min": min, "max": max, "sum": sum}


def at(data: Any, parts: list[str]) -> list[Any]:
    """All that is in `data` at the path. A name may have slashes of its own."""
    if not parts:
        return data if isinstance(data, list) else [data]
    if isinstance(data, dict):
        if len(names := fnmatch.filter(data, parts[0])) == 1:
            return at(data[names[0]], parts[1:])
        n = next(n for n in range(1, len(parts) + 1) if "/".join(parts[:n]) in data)
        return at(data["/".join(parts[:n])], parts[n:])
    if parts[0].isdecimal():
        return at(data[int(parts[0])], parts[1:])
    wanted = [condition.split("=") for condition in parts[0].split("&") if condition != "*"]
    rows = [row for row in data if all(str(row[name]) == value for name, value in wanted)]
    return [found for row in rows for found in at(row, parts[1:])]


def values(file: str, key: str) -> list[float]:
    """What a mark names: a number, or ratio, low and high."""
    data = json.loads(_path(file).read_text(encoding="utf-8"))
    call, inner, plain, scale = _KEY.fullmatch(key).groups()
    found, *under = [at(data, operand.split("/")) for operand in (inner or plain).split(" // ")]
    found = [a / b for a, b in zip(found, under[0], strict=True)] if under else found
    (result,) = [_CALLS[call](found)] if call else found
    numbers = [result[name] for name in ("ratio", "low", "high")] if isinstance(result, dict) else [result]
    return [number * float(scale or 1) for number in numbers]


def _path(file: str) -> Path:
    folder = next(name for name in ("bench/results", "docs/figures") if (ROOT / name / file).exists())
    return ROOT / folder / file


def commits(file: str) -> list[str]:
    """The commits at which the file's numbers were measured, short."""

    def found(data: Any) -> Iterator[str]:
        if isinstance(data, dict) and isinstance(data.get("commit"), str):
            yield data["commit"][:7]
        for each in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
            yield from found(each)

    return sorted(set(found(json.loads(_path(file).read_text(encoding="utf-8")))))


def files(text: str) -> list[str]:
    """The files that the page's marks name."""
    named = {" ".join(mark[1].split()).partition(":")[0] for mark in _MARK.finditer(text)}
    return sorted(name for name in named if name.endswith(".json"))


def mistakes(page: str, text: str) -> Iterator[str]:
    """A line for each number of the page that is not what its mark names, and each range without a mark."""
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), text)
    for mark in (mark for mark in _MARK.finditer(text) if not re.match(r"not\s+recorded: ", mark[1])):
        file, _, key = " ".join(mark[1].split()).partition(":")
        before = " ".join(_MARK.sub("", text[: mark.start()]).split())[-60:]
        where = f"{page}:{text.count(chr(10), 0, mark.start()) + 1}: {before[-24:]!r}<!--{file}:{key}-->"
        percent = before.rstrip("*").endswith("%") or text.startswith("%", mark.end())
        try:
            exact = values(file, key)
            shown = (_INTERVAL if len(exact) == 3 else _SINGLE).search(before).groups()
        except (StopIteration, LookupError, TypeError, ValueError, AttributeError) as error:
            yield f"{where} names no number: {type(error).__name__} {error}"
            continue
        for number, one in zip(shown, exact, strict=True):
            plain = re.sub("[–−]", "-", (number or "").replace(",", ""))
            meant = f"{one * 100 if percent else one:.{len(plain.partition('.')[2])}f}"
            if number and plain != meant:
                yield f"{where}: {number} should be {meant}"
    for found in _UNMARKED.finditer(text):
        yield f"{page}:{text.count(chr(10), 0, found.start()) + 1}: {' '.join(found[0].split())!r} has no mark"


def pages() -> dict[str, str]:
    """README and all pages by their paths, not those that are made."""
    paths = [p for p in (ROOT / "docs").rglob("*.md") if p.parent.name not in ("commands", "tables")]
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in (ROOT / "README.md", *paths)}


if __name__ == "__main__":
    raise SystemExit("\n".join(line for page, text in pages().items() for line in mistakes(page, text)) or 0)
