"""Where records come from: a JSON-lines file, or a Hugging Face data set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from .foreign import of_parquet
from .records import DataError, Record, read_lines, read_records, read_rows

# What a hub id may look like; a name with a file's ending is taken for a file.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILE = re.compile(r".*\.(jsonl?|ndjson|txt|csv|tsv|parquet|arrow|gz|zst)", re.IGNORECASE)
_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json")  # a folder from `save_to_disk` has one of them
INSTALL = 'pip install "odc-triton[data]"'


class Source(Protocol):
    """Records in a fixed order. Errors call the source by its `name`."""

    name: str

    def __iter__(self) -> Iterator[Record]:
        """All records, from the first. Raises DataError."""

    def rows(self) -> Iterator[tuple[str, Any]]:
        """(how errors name it, what is there) of each record, not looked at. Raises DataError."""

    def total(self) -> int:
        """The last record's `end`: bytes of a file, rows of a table."""

    def fingerprint(self) -> str | None:
        """Changes whenever the records do. None: not known, so nothing made from them may be kept for a later run."""


class JsonLines:
    """A JSON-lines file."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = path
        self.name = str(path)

    def __iter__(self) -> Iterator[Record]:
        return read_records(self.path)

    def rows(self) -> Iterator[tuple[str, Any]]:
        return ((where, value) for _, where, value, _ in read_lines(self.path))

    def total(self) -> int:
        return os.path.getsize(self.path)

    def fingerprint(self) -> str:
        """Path, size and both times. The inode's change time can't be set by hand, so it also detects a file that was
        replaced, or edited with its date kept. Raises DataError."""
        try:
            status = os.stat(self.path)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} cannot be read: {getattr(error, 'strerror', error)}") from error
        return f"{os.path.realpath(self.path)} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


class Rows:
    """Any table: an iterable of dicts that has a length and can be iterated more than once."""

    def __init__(self, table: Any, name: str, fingerprint: str | None = None) -> None:
        self.table, self.name, self._fingerprint = table, name, fingerprint

    def __iter__(self) -> Iterator[Record]:
        return read_rows(self.table, self.name)

    def rows(self) -> Iterator[tuple[str, Any]]:
        return ((f"{self.name}, row {number}", row) for number, row in enumerate(self.table))

    def total(self) -> int:
        return len(self.table)

    def fingerprint(self) -> str | None:
        return self._fingerprint


def open_source(name: str) -> Source:
    """The source that a user names: a JSON-lines file; `folder[:split]`, saved by `save_to_disk`; or
    `hub-id[:split]` or `hub-id:configuration:split`, a data set on the hub. The split is "train" by default.

    Raises DataError, also if the `datasets` library is needed and not installed.
    """
    if not name or "\0" in name:
        raise DataError(f"{name!r} names no data; give a file of JSON lines, a folder or a hub id")
    if os.path.isdir(name):
        return _from_folder(name, None)
    if os.path.exists(name):
        return JsonLines(name)
    place, _, rest = name.partition(":")
    if rest and os.path.isdir(place):
        return _from_folder(place, rest)
    if _FILE.fullmatch(place) or not _HUB_ID.fullmatch(place):
        raise DataError(f"{name} cannot be read: No such file or directory")
    configuration, _, split = rest.rpartition(":")
    return _from_hub(name, place, configuration or None, split or "train")


def _from_folder(folder: str, split: str | None) -> Source:
    if not any(Path(folder, name).exists() for name in _SAVED) and next(Path(folder).rglob("*.parquet"), None):
        raise DataError(
            f"{folder} holds Parquet files, not a data set of `save_to_disk`; convert it to JSON lines: "
            f"{of_parquet(folder)}"
        )
    datasets = _import_datasets(f"{folder} is a folder")
    loaded = _load(folder, lambda: datasets.load_from_disk(folder))
    if isinstance(loaded, datasets.DatasetDict):
        wanted = split or "train"
        if wanted not in loaded:
            raise DataError(f"{folder} has no split {wanted!r}; give one of {_choices(folder, loaded)}")
        return _rows(loaded[wanted], f"{folder}:{wanted}")
    if split is not None:
        raise DataError(f"{folder} is one data set without splits; leave out ':{split}'")
    return _rows(loaded, folder)


def _from_hub(name: str, hub_id: str, configuration: str | None, split: str) -> Source:
    datasets = _import_datasets(f"{name} is not a local file, so it was taken for a data set on the hub")
    return _rows(_load(name, lambda: datasets.load_dataset(hub_id, configuration, split=split)), name)


def _rows(loaded: Any, name: str) -> Rows:
    # Private by name, but documented as the state of a data set's cache; without it nothing is kept.
    return Rows(loaded, name, getattr(loaded, "_fingerprint", None))


def _load(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # from the network, the hub, arrow, the file system
        reason = " ".join(str(error).split())[:500]
        raise DataError(f"{name} cannot be read as a data set ({type(error).__name__}: {reason})") from error


def _choices(folder: str, splits: Any) -> str:
    return ", ".join(f"{Path(folder)}:{split}" for split in splits)


def _import_datasets(why: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{why}, and that needs the `datasets` library: {INSTALL}") from error
    return datasets
