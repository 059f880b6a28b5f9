"""Rows of tables, a part at a time: Parquet and Arrow by the library `datasets`, CSV by Python's own reader.

Each file has its own columns, so a folder's files need not agree. The nulls that structs get from each other's fields
in one column are left out.

All cells of a CSV file are text: "007" and "NA" are what they look like, and an empty cell is an empty text. Not by
`datasets`, whose pandas fills a row that is too short with empty cells and drops those that are too many, so that what
a missing quotation mark makes of a text would be learned.
"""

from __future__ import annotations

import csv
import glob
import io
import logging
import os
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

from .json_files import LARGEST_LINE_BYTES, Value, library, opened, require_bounded, unpacked
from .records import DataError

_ROWS = 1024  # that are decoded at a time
_NESTED = ("messages", "conversations", "prompt", "completion", "tools")
_DELIMITERS = {"CSV": ",", "TSV": "\t"}
LOADED = {"Parquet": "parquet", "Arrow": "arrow"}  # by the `datasets` library's module of this name


def read_table(path: str | os.PathLike, kind: str) -> Iterator[Value]:
    """The rows of a file of CSV, TSV, Parquet or Arrow, numbered from 0. Raises DataError."""
    row = -1
    try:
        rows = _loaded(path, kind) if kind in LOADED else _cells(path, _DELIMITERS[kind])
        for row, (fields, end) in enumerate(rows):
            yield f"{path}, row {row}", fields, end
    except DataError:
        raise
    except Exception as error:  # of the file system, the unpackers, csv, and arrow in its library
        reason = " ".join(str(error).split())[:300]
        after = f" after row {row}" if row >= 0 else ""
        raise DataError(f"{path} cannot be read as {kind}{after}: {reason}") from error


def without_nulls(fields: Any) -> Any:
    """A row, the structs in its messages and tools without the fields that are null."""
    if not isinstance(fields, dict):
        return fields
    return {name: _without_none(value) if name in _NESTED else value for name, value in fields.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _loaded(path: str | os.PathLike, kind: str) -> Iterator[tuple[dict, int]]:
    opened(path).close()  # raises for what is not a file
    name = LOADED[kind]
    module = library(f"datasets.packaged_modules.{name}.{name}", f"{path} is a table ({kind})")
    logging.getLogger(module.__name__).setLevel(logging.CRITICAL)  # what it logs it also raises
    options = {"batch_size": _ROWS} if kind == "Parquet" else {}
    # Its builder, as `load_dataset` would report to the hub which formats are read.
    with TemporaryDirectory(prefix="odc-triton-data-") as scratch:  # for its lock
        builder = getattr(module, kind)(
            cache_dir=scratch, data_files={"train": [glob.escape(os.path.abspath(path))]}, **options
        )
        table = builder.as_streaming_dataset("train")
    if "Json(" not in repr(table.features):  # which is how it keeps unlike structs
        table = table.decode(False)  # pictures and sounds stay bytes
    return ((without_nulls(fields), 0) for fields in table)


def _cells(path: str | os.PathLike, delimiter: str) -> Iterator[tuple[dict, int]]:
    csv.field_size_limit(LARGEST_LINE_BYTES)
    with opened(path) as raw, unpacked(raw, path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:

        def lines() -> Iterator[str]:
            for number, line in enumerate(iter(lambda: text.readline(LARGEST_LINE_BYTES + 1), ""), start=1):
                require_bounded(f"{path}, line {number}", line)
                yield line

        rows = (cells for cells in csv.reader(lines(), delimiter=delimiter, strict=True) if cells)  # no empty lines
        columns = next(rows, [])
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise DataError(f"{path} has the column {twice[0]!r} {columns.count(twice[0])} times; rename all but one")
        for row, cells in enumerate(rows):
            if len(cells) != len(columns):
                raise DataError(
                    f"{path}, row {row}: the header has {len(columns)} columns and this row {len(cells)} cells; is a "
                    "quotation mark missing?"
                )
            yield dict(zip(columns, cells, strict=True)), raw.tell()
