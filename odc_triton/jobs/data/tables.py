"""Rows of tables, read in chunks: Parquet and Arrow by the library `datasets` and its pyarrow, CSV by Python's own.

Each file has its own columns, so a folder's files need not agree. A column of structs has the fields of all its rows;
the nulls that this adds are removed.

The readers of `datasets` are not used, for two reasons. It streams Parquet in threads of arrow: if a file isn't read
to its end, as before a run, they may abort the process at its exit (apache/arrow#45214). It reads CSV by pandas, which
fills rows that are too short with empty cells and drops surplus cells, so text garbled by a missing quotation mark
would be learned. All cells of a CSV file are text: "007" and "NA" stay as they are, and an empty cell is an empty text.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from .json_files import LARGEST_LINE_BYTES, Value, library, opened, require_bounded, unpacked
from .records import DataError

_ROWS, _BYTES = 1024, 64 * 2**20  # most that are decoded at a time; a row may be larger alone
_NESTED = ("messages", "conversations", "prompt", "completion", "tools")
_DELIMITERS = {"CSV": ",", "TSV": "\t"}


def read_table(path: str | os.PathLike, kind: str) -> Iterator[Value]:
    """The rows of a file of CSV, TSV, Parquet or Arrow, numbered from 0. Raises DataError."""
    row = -1
    try:
        rows = _loaded(path, kind) if kind in LOADED else _cells(path, _DELIMITERS[kind])
        for row, fields in enumerate(rows):
            yield f"{path}, row {row}", fields
    except DataError:
        raise
    except Exception as error:  # of the file system, the unpackers, csv, and arrow in its library
        reason = " ".join(str(error).split())[:300]
        after = f" after row {row}" if row >= 0 else ""
        raise DataError(f"{path} cannot be read as {kind}{after}: {reason}") from error


def without_nulls(fields: Any) -> Any:
    """A row, without null fields in the structs of its messages and tools."""
    if not isinstance(fields, dict):
        return fields
    return {name: _without_none(value) if name in _NESTED else value for name, value in fields.items()}


def keep_encoded(features: Any) -> None:
    """Makes the images in `features` of `datasets` stay as they are stored: {"bytes": …, "path": …}."""
    if type(features).__name__ == "Image":
        features.decode = False
    if isinstance(features, dict):
        nested = [*features.values()]
    else:
        nested = features if isinstance(features, list) else [getattr(features, "feature", None)]
    for each in nested:
        if each is not None:
            keep_encoded(each)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _loaded(path: str | os.PathLike, kind: str) -> Iterator[dict]:
    why = f"{path} is a table ({kind})"
    with opened(path) as file:
        for batch in LOADED[kind](file, why):
            decode = dict
            if b'"Json"' in (batch.schema.metadata or {}).get(b"huggingface", b""):  # its way to keep unlike structs
                features = library("datasets", why).Features.from_arrow_schema(batch.schema)
                keep_encoded(features)
                decode = features.decode_example
            step = _rows(batch.num_rows, batch.nbytes)
            for start in range(0, batch.num_rows, step):
                for fields in batch.slice(start, step).to_pylist():
                    yield without_nulls(decode(fields))


def _parquet(file: BinaryIO, why: str) -> Iterator[Any]:
    table = library("pyarrow.parquet", why).ParquetFile(file)
    found = table.metadata
    size = sum(found.row_group(at).total_byte_size for at in range(found.num_row_groups))
    return table.iter_batches(batch_size=_rows(found.num_rows, size))


def _rows(count: int, size: int) -> int:
    """Rows to decode at a time, of `count` rows of `size` bytes: images are large."""
    return max(1, min(_ROWS, count * _BYTES // max(size, 1)))


def _arrow(file: BinaryIO, why: str) -> Iterator[Any]:
    ipc = library("pyarrow.ipc", why)
    is_whole = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_whole:
        return iter(ipc.open_stream(file))
    whole = ipc.open_file(file)
    return map(whole.get_batch, range(whole.num_record_batches))


LOADED = {"Parquet": _parquet, "Arrow": _arrow}


def _cells(path: str | os.PathLike, delimiter: str) -> Iterator[dict]:
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
            yield dict(zip(columns, cells, strict=True))
