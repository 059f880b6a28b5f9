"""Lengths of sequences, from a file that has them or the texts themselves. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .train.records import Record, parse_record

LEAST = 2  # tokens: one to predict, one to predict it from


def read_lengths(
    path: str | Path, token_cap: int | None = None, count_tokens: Callable[[Record], int] | None = None
) -> list[int]:
    """Lengths in tokens, in the file's order, cut off at `token_cap` where that is given.

    A line is a number, or a JSON object with `length`, or with what `train.records` reads; blank lines are skipped.
    `count_tokens` gives a record's length.

    Raises ValueError that names file and line for one that is no length, one of less than 2 tokens, and a text without
    `count_tokens`; and for a file without lengths. OSError where it can't be read.
    """
    lengths = []
    for number, raw in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if raw.strip():
            where = f"{path}, line {number}"
            length = _length(where, raw, count_tokens)
            lengths.append(length if token_cap is None else min(length, token_cap))
    if not lengths:
        raise ValueError(f"{path} has no lengths; give one number of tokens a line, or JSON lines")
    return lengths


def _length(where: str, raw: bytes, count_tokens: Callable[[Record], int] | None) -> int:
    text = raw.decode("utf-8-sig", errors="replace").strip()
    value: object = text
    if text.startswith("{"):
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON: {error}") from error
        if "length" not in record:
            parsed = parse_record(where, raw)
            if count_tokens is None:
                raise ValueError(f"{where} has a text and no `length`: give --tokenizer, or write its length")
            tokens = count_tokens(parsed)
            if tokens < LEAST:
                raise ValueError(f"{where} is a text of {tokens} tokens; leave it out, or give at least {LEAST}")
            return tokens
        value = record["length"]
    try:
        length = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else 0
    except ValueError:
        length = 0
    if length < LEAST:
        shown = repr(value)[:42]
        raise ValueError(f"{where}: {shown} is no length; give a number of tokens, at least {LEAST}")
    return length
