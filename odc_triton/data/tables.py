"""Rows of tables: Parquet, Arrow and CSV files, by pyarrow, a thousand rows at a time.

Each file has its own columns, so a folder's files need not agree. All of a CSV file's fields are text: "007" and "NA"
are what they look like. The nulls that structs get from each other's fields in one column are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from .forms import record_of
from .json_files import LARGEST_LINE_BYTES, Value, import_pyarrow, opened, unpacked
from .records import DataError, Record

_ROWS = 1024
_NESTED = ("messages", "conversations", "prompt", "completion", "tools")


def read_rows(rows: Iterable[Any], name: str) -> Iterator[Record]:
    """The records of a table whose rows are dicts. Raises DataError for an unusable row, and where there is none."""
    row = -1
    for row, fields in enumerate(rows):
        yield record_of(f"{name}, row {row}", without_nulls(fields), line=row, end=row + 1)
    if row < 0:
        raise DataError(f"{name} has no rows; it needs at least one")


def read_table(path: str | os.PathLike, kind: str) -> Iterator[Value]:
    """The rows of a file, numbered from 0; `kind`: a key of `KINDS`. Raises DataError."""
    arrow, row = import_pyarrow(f"{path} is a table ({kind})"), -1
    try:
        size_bytes = os.path.getsize(path)
        with opened(path) as file:
            for batch in KINDS[kind](file, path):
                decoded = _decoder(batch.schema)
                for fields in batch.to_pylist():
                    row += 1
                    yield row, f"{path}, row {row}", without_nulls(decoded(fields)), min(file.tell(), size_bytes)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{path} cannot be read as {kind}: {reason}") from error
    if row < 0:
        raise DataError(f"{path} has no rows; it needs at least one")


def without_nulls(fields: Any) -> Any:
    """A row, the structs in its messages and tools without the fields that are null."""
    if not isinstance(fields, dict):
        return fields
    return {name: _without_none(value) if name in _NESTED else value for name, value in fields.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _decoder(schema: Any) -> Callable[[dict], dict]:
    """What the library `datasets` does with a row of a file that it wrote: it keeps unlike structs as JSON."""
    if b'"Json"' not in (schema.metadata or {}).get(b"huggingface", b""):
        return lambda fields: fields
    from datasets import Features

    return Features.from_arrow_schema(schema).decode_example


def _parquet(file: BinaryIO, path: Any) -> Iterator[Any]:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=_ROWS)


def _arrow(file: BinaryIO, path: Any) -> Iterator[Any]:
    import pyarrow.ipc

    if file.read(6) == b"ARROW1":
        whole = pyarrow.ipc.open_file(file)
        batches = (whole.get_batch(number) for number in range(whole.num_record_batches))
    else:
        file.seek(0)
        batches = iter(pyarrow.ipc.open_stream(file))
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS):
            yield batch.slice(start, _ROWS)


def _csv(delimiter: str) -> Callable[[BinaryIO, Any], Iterator[Any]]:
    def read(file: BinaryIO, path: Any) -> Iterator[Any]:
        import pyarrow.csv

        how = {
            "read_options": pyarrow.csv.ReadOptions(block_size=LARGEST_LINE_BYTES),
            "parse_options": pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        }
        columns = pyarrow.csv.open_csv(unpacked(file, path), **how).schema.names
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise DataError(f"{path} has the column {twice[0]!r} {columns.count(twice[0])} times; rename all but one")
        file.seek(0)
        as_text = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(columns, pyarrow.string()))
        yield from pyarrow.csv.open_csv(unpacked(file, path), convert_options=as_text, **how)

    return read


KINDS: dict[str, Callable[[BinaryIO, Any], Iterator[Any]]] = {
    "Parquet": _parquet,
    "Arrow": _arrow,
    "CSV": _csv(","),
    "TSV": _csv("\t"),
}
