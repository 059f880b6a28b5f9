"""Files of JSON: one value a line, or one array of values; compressed or not.

Read line by line, memory does not grow with the file. An array is read whole.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from .records import DataError

# Tokenising a line takes about a hundred times its size in memory.
LARGEST_LINE_BYTES = 16 * 2**20
_LARGEST_ARRAY_BYTES = 2 * 2**30
Value = tuple[str, Any]  # its name in errors, itself
_EACH_LINE = 'every line must hold one whole JSON object, as {"text": "…"} for plain text'
_ARRAY = "a file that begins with '[' must be one JSON array; or write one object a line"


def read_json(path: str | os.PathLike) -> Iterator[Value]:
    """The values of a file (UTF-8; blank lines are skipped). Lines are numbered from 1, an array's elements from 0.

    Raises DataError with the file, and the line if there is one, for invalid JSON and for a line of more than
    `LARGEST_LINE_BYTES`.
    """
    try:
        with opened(path) as raw, unpacked(raw, path) as file:
            yield from _values(os.fspath(path), file)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def opened(path: str | os.PathLike) -> BinaryIO:
    """Opens a regular file. Raises OSError, and DataError: a pipe would block here, and can't be read twice."""
    if "\0" in os.fspath(path):
        raise DataError(f"{path!r} cannot be read: a name can't have a NUL")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DataError(f"{path} cannot be read: it is not a regular file")
    return open(path, "rb")


def unpacked(raw: BinaryIO, path: str | os.PathLike) -> BinaryIO:
    """`raw`, decompressed if it is gzip, bzip2, xz or zstd; reading raises their errors.

    Raises DataError if a required library is not installed.
    """
    magic = raw.read(6)
    raw.seek(0)
    for begin, unpack in ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ", lzma.open)):
        if magic.startswith(begin):
            return unpack(raw)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        pyarrow = library("pyarrow", f"{path} is packed by zstd")
        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    return raw


def library(module: str, why: str) -> Any:
    """A module of the library `datasets`, or of its own pyarrow. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f'{why}, and that needs the `datasets` library: pip install "odc-triton[data]"') from error


def require_bounded(where: str, line: str | bytes) -> None:
    """Raises DataError for a line of more than `LARGEST_LINE_BYTES`."""
    if len(line) > LARGEST_LINE_BYTES:
        raise DataError(
            f"{where}: longer than {LARGEST_LINE_BYTES // 2**20} MiB, the limit for one record; split its text "
            "into several records, or keep its images in files"
        )


def _values(path: str, file: BinaryIO) -> Iterator[Value]:
    first = True
    lines = iter(lambda: file.readline(LARGEST_LINE_BYTES + 1), b"")
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        if first and line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            content = line + file.read(_LARGEST_ARRAY_BYTES)
            if len(content) > _LARGEST_ARRAY_BYTES:
                raise DataError(
                    f"{path} is a JSON array of more than {_LARGEST_ARRAY_BYTES / 2**30:g} GiB, which would be read "
                    "whole; write one object a line"
                )
            yield from ((f"{path}, row {row}", value) for row, value in enumerate(parse_json(path, content, _ARRAY)))
            return
        require_bounded(where, line)
        first = False
        yield where, parse_json(where, line)


def parse_json(where: str, raw: bytes, remedy: str = _EACH_LINE) -> Any:
    """The value of one line. `where`: its name in errors. Raises DataError."""
    try:
        # utf-8-sig: Windows editors put a byte order mark at the start.
        return json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        why: object = error
        if isinstance(error, json.JSONDecodeError) and b"\n" not in raw.rstrip():  # its own "line 1" would mislead
            why = f"{error.msg}, at character {error.pos + 1}"
        raise DataError(f"{where}: not valid JSON in UTF-8: {why}; {remedy}") from error
