"""Lengths of sequences, from a file of lengths or of texts. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .dataset import TokenizedDataset
from .forms import record_of
from .json_files import parse_json, read_json
from .records import Record

LEAST = 2  # tokens: one to predict, one to predict it from
_FIELDS = ("length", "tokens", "input_ids")
CountTokens = Callable[[Record], int]


def read_lengths(path: str | Path, token_cap: int | None = None, count_tokens: CountTokens | None = None) -> list[int]:
    """Lengths in tokens, in the file's order, cut off at `token_cap` if given.

    - `.npz` of a prepared data set;
    - `.json`: a list of numbers;
    - any other, line by line: numbers, or a JSON object with `length` or `tokens` (a number), with `input_ids` (a
      list), or with a record as `data.forms` reads it, whose length `count_tokens` gives; blank lines are skipped.

    Raises ValueError naming file and line for an invalid length, for less than 2 tokens, and for a text without
    `count_tokens`; also for a file without lengths. Raises OSError if it can't be read.
    """
    lengths = [_checked(where, value) for where, value in _values(Path(path), count_tokens)]
    if not lengths:
        raise ValueError(f"{path} has no lengths; give one number of tokens a line, or JSON lines")
    return lengths if token_cap is None else [min(length, token_cap) for length in lengths]


def _values(path: Path, count_tokens: CountTokens | None) -> Iterator[tuple[str, object]]:
    path.stat()  # raises if it isn't there
    if path.suffix == ".npz":
        lengths = TokenizedDataset.load(path, verify=True).lengths.tolist()
        yield from ((f"{path}, sample {n}", length) for n, length in enumerate(lengths))
        return
    if path.suffix == ".json":
        yield from read_json(path)
        return
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path}, line {number}"
        text = raw.decode("utf-8-sig", errors="replace").strip()
        if text.startswith("{"):
            yield where, _of_fields(where, parse_json(where, raw), count_tokens)
        else:
            yield from ((where, word) for word in text.split())


def _of_fields(where: str, fields: dict[str, Any], count_tokens: CountTokens | None) -> object:
    for name in _FIELDS:
        if name in fields:
            return len(fields[name]) if isinstance(fields[name], list) else fields[name]
    record = record_of(where, fields)
    if count_tokens is None:
        raise ValueError(f"{where} has a text and no `length`: give --tokenizer, or add its length")
    tokens = count_tokens(record)
    if tokens < LEAST:
        raise ValueError(f"{where} is a text of {tokens} tokens; leave it out, or give at least {LEAST}")
    return tokens


def _checked(where: str, value: object) -> int:
    try:
        length = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        length = math.nan
    if not (math.isfinite(length) and length >= LEAST and length == int(length)):
        shown = repr(value)[:42]
        raise ValueError(f"{where}: {shown} is not a length; give a number of tokens, at least {LEAST}")
    return int(length)
