"""Training records: a JSON-lines file read line by line, every line checked.

A line holds {"text": …}, all of it to be learned, or {"prompt": …, "completion": …}, the completion to be
learned. Other fields are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice


class DataError(ValueError):
    """Training data that cannot be used; the message names the file, the line where there is one, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of a data file. `prompt` is None for a text; `completion` is then the whole of it."""

    prompt: str | None
    completion: str
    line: int  # from 1
    end_byte: int  # where the line ends in the file


def read_records(path: str | os.PathLike) -> Iterator[Record]:
    """The records of a JSON-lines file (UTF-8; blank lines are skipped), one at a time.

    Raises DataError with file and line for one that is not usable, and for a file without any.
    """
    end_byte, empty = 0, True
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                end_byte += len(raw)
                if raw.strip():
                    empty = False
                    prompt, completion = parse_record(f"{path}, line {number}", raw)
                    yield Record(prompt=prompt, completion=completion, line=number, end_byte=end_byte)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if empty:
        raise DataError(f"{path} is empty; it needs at least one JSON object, each on its own line")


def parse_record(where: str, raw: bytes) -> tuple[str | None, str]:
    """(prompt, completion) of one line; the prompt of a text is None. `where`: for errors. Raises DataError."""
    try:
        # utf-8-sig: editors on Windows put a byte order mark in front.
        record = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{where}: not UTF-8 (byte 0x{byte:02x} at {error.start}); convert the file to UTF-8"
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: not usable JSON: nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a {type(record).__name__}, not a JSON object with 'text', or 'prompt' and 'completion'"
        )
    pair = [name for name in ("prompt", "completion") if name in record]
    if "text" in record and pair:
        raise DataError(f"{where}: has 'text' and also {' and '.join(map(repr, pair))}; keep one of the two forms")
    if "text" in record:
        return None, _string(where, record, "text")
    if len(pair) < 2:
        raise DataError(
            f"{where}: needs 'text', or both 'prompt' and 'completion'; it has {_names(record)}. "
            "Render conversations to one of these forms first (a tokenizer's apply_chat_template)"
        )
    return _string(where, record, "prompt"), _string(where, record, "completion")


def _string(where: str, record: dict, name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: {name!r} must be a string, not a {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: {name!r} has half a surrogate pair at character {error.start}; "
                "write the whole pair, or leave the character out"
            ) from error
    return value


def _names(record: dict) -> str:
    shown = [ascii(name[:40]) for name in islice(record, 8)]
    more = len(record) - len(shown)
    return (", ".join(shown) or "no field") + (f" and {more} more" if more else "")
