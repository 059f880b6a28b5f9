"""Where records come from: a file, a folder of files, a data set of the library `datasets`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ..base.hub import hub_problem
from .folders import files_of, kind_of_file
from .forms import record_of
from .json_files import INSTALL, Value, import_pyarrow, read_json
from .records import DataError, Record
from .tables import KINDS, read_rows, read_table

# What a hub id may look like; a name with a file's ending is taken for a file.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILE = re.compile(r".*\.(jsonl?|ndjson|txt|csv|tsv|parquet|arrow|feather|gz|bz2|xz|zst)", re.IGNORECASE)
_SAVED = ("state.json", "dataset_dict.json")  # a folder from `save_to_disk` has one of them


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


class File:
    """A file: JSON lines, a JSON array, or a table."""

    def __init__(self, path: str | os.PathLike, kind: str = "JSON") -> None:
        """`kind`: as `kind_of_file` gives it. Raises DataError if a library is missing that it needs."""
        self.path, self.name = path, str(path)
        self._read: Callable[[], Iterator[Value]] = lambda: read_json(path)
        if kind in KINDS:
            import_pyarrow(f"{path} is a table ({kind})")
            self._read = lambda: read_table(path, kind)

    def __iter__(self) -> Iterator[Record]:
        return (record_of(where, value, line=number, end=end) for number, where, value, end in self._read())

    def rows(self) -> Iterator[tuple[str, Any]]:
        return ((where, value) for _, where, value, _ in self._read())

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


class Files:
    """Files of one kind, one after the other."""

    def __init__(self, files: list[File], name: str) -> None:
        self.files, self.name = files, name

    def __iter__(self) -> Iterator[Record]:
        before = 0
        for file in self.files:
            for record in file:
                yield replace(record, end=before + record.end)
            before += file.total()

    def rows(self) -> Iterator[tuple[str, Any]]:
        return (row for file in self.files for row in file.rows())

    def total(self) -> int:
        return sum(file.total() for file in self.files)

    def fingerprint(self) -> str:
        return "\n".join(file.fingerprint() for file in self.files)


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
    """The source that a user names: a file; `folder[:split]`, of files or saved by `save_to_disk`; or `hub-id[:split]`
    or `hub-id:configuration:split`, a data set on the hub. The split is "train" by default.

    Raises DataError, also if a library is needed and not installed.
    """
    if not name or "\0" in name:
        raise DataError(f"{name!r} names no data; give a file, a folder or a hub id")
    if os.path.isdir(name):
        return _from_folder(name, None)
    if os.path.exists(name):
        return File(name, kind_of_file(name))
    local, _, split = name.rpartition(":")
    if local and os.path.isdir(local):
        return _from_folder(local, split)
    if local and os.path.exists(local):
        raise DataError(f"{local} is one file without splits; leave out ':{split}'")
    place, _, rest = name.partition(":")
    if _FILE.fullmatch(place) or not _HUB_ID.fullmatch(place):
        raise DataError(f"{name} cannot be read: No such file or directory")
    configuration, _, split = rest.rpartition(":")
    return _from_hub(name, place, configuration or None, split or "train")


def _from_folder(folder: str, split: str | None) -> Source:
    if any(Path(folder, name).exists() for name in _SAVED):
        return _from_saved(folder, split)
    kind, paths = files_of(folder, split)
    return Files([File(path, kind) for path in paths], folder if split is None else f"{folder}:{split}")


def _from_saved(folder: str, split: str | None) -> Source:
    datasets = _import_datasets(f"{folder} is a data set of `save_to_disk`")
    loaded = _load(folder, lambda: datasets.load_from_disk(folder))
    if isinstance(loaded, datasets.DatasetDict):
        wanted = split or "train"
        if wanted not in loaded:
            choices = ", ".join(f"{Path(folder)}:{split}" for split in loaded)
            raise DataError(f"{folder} has no split {wanted!r}; give one of {choices}")
        return _rows(loaded[wanted], f"{folder}:{wanted}")
    if split is not None:
        raise DataError(f"{folder} is one data set without splits; leave out ':{split}'")
    return _rows(loaded, folder)


def _from_hub(name: str, hub_id: str, configuration: str | None, split: str) -> Source:
    taken = f"{name} is not a local file, so it was taken for a data set on the hub"
    problem = hub_problem()  # before the import, as the library reads then whether it is offline
    datasets = _import_datasets(taken)
    try:
        return _rows(_load(name, lambda: datasets.load_dataset(hub_id, configuration, split=split)), name)
    except DataError as error:
        raise error if problem is None else DataError(f"{taken}, and can't be read: {problem}") from error


def _rows(loaded: Any, name: str) -> Rows:
    # Private by name, but documented as the state of a data set's cache; without it nothing is kept.
    return Rows(loaded, name, getattr(loaded, "_fingerprint", None))


def _load(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # from the network, the hub, arrow, the file system
        reason = " ".join(str(error).split())[:500]
        raise DataError(f"{name} cannot be read as a data set: {reason}") from error


def _import_datasets(why: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{why}, and that needs the `datasets` library: {INSTALL}") from error
    return datasets
