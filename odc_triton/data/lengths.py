"""Lengths of sequences, from a file of lengths or of texts. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from .dataset import TokenizedDataset
from .json_files import parse_record
from .records import Record

LEAST = 2  # tokens: one to predict, one to predict it from
_FIELDS = ("length", "tokens", "input_ids")


def read_lengths(
    path: str | Path, token_cap: int | None = None, count_tokens: Callable[[Record], int] | None = None
) -> list[int]:
    """Lengths in tokens, in the file's order, cut off at `token_cap` if given.

    - `.npz` of a prepared data set;
    - `.json`: a list of numbers;
    - any other, line by line: numbers, or a JSON object with `length` or `tokens` (a number), with `input_ids` (a
      list), or with a record as `data.records` reads it, whose length `count_tokens` gives; blank lines are skipped.

    Raises ValueError naming file and line for what is not a length, for less than 2 tokens, and for a text without
    `count_tokens`; also for a file without lengths. Raises OSError if it can't be read.
    """
    path = Path(path)
    read = {".npz": _of_data_set, ".json": _of_list}.get(path.suffix)
    values = _of_lines(path, count_tokens) if read is None else read(path)
    lengths = [_checked(where, value) for where, value in values]
    if not lengths:
        raise ValueError(f"{path} has no lengths; give one number of tokens a line, or JSON lines")
    return lengths if token_cap is None else [min(length, token_cap) for length in lengths]


def _of_data_set(path: Path) -> Iterator[tuple[str, object]]:
    path.stat()  # raises if it isn't there
    lengths = TokenizedDataset.load(path, verify=True).lengths.tolist()
    yield from ((f"{path}, sample {n}", length) for n, length in enumerate(lengths))


def _of_list(path: Path) -> Iterator[tuple[str, object]]:
    values = _parsed(str(path), path.read_bytes())
    if not isinstance(values, list):
        raise ValueError(f"{path} holds a {type(values).__name__}; give a list of lengths")
    yield from ((f"{path}, element {n}", value) for n, value in enumerate(values))


def _of_lines(path: Path, count_tokens: Callable[[Record], int] | None) -> Iterator[tuple[str, object]]:
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path}, line {number}"
        text = raw.decode("utf-8-sig", errors="replace").strip()
        if text.startswith("{"):
            yield where, _of_record(where, raw, count_tokens)
        else:
            yield from ((where, word) for word in text.split())


def _of_record(where: str, raw: bytes, count_tokens: Callable[[Record], int] | None) -> object:
    fields = _parsed(where, raw)
    for name in _FIELDS:
        if name in fields:
            return len(fields[name]) if isinstance(fields[name], list) else fields[name]
    record = parse_record(where, raw)
    if count_tokens is None:
        raise ValueError(f"{where} has a text and no `length`: give --tokenizer, or add its length")
    tokens = count_tokens(record)
    if tokens < LEAST:
        raise ValueError(f"{where} is a text of {tokens} tokens; leave it out, or give at least {LEAST}")
    return tokens


def _parsed(where: str, raw: bytes) -> object:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def _checked(where: str, value: object) -> int:
    try:
        length = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        length = math.nan
    if not (math.isfinite(length) and length >= LEAST and length == int(length)):
        shown = repr(value)[:42]
        raise ValueError(f"{where}: {shown} is not a length; give a number of tokens, at least {LEAST}")
    return int(length)
