"""Sources of records: a file, a folder of files, a data set of the library `datasets`."""

from __future__ import annotations

import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...base.hub import hub_problem
from .forms import record_of
from .json_files import Value, library, opened, read_json, unpacked
from .records import DataError, Record, names_of
from .tables import LOADED, keep_encoded, read_table, without_nulls

# The form of a hub id; a name with a file's suffix is taken for a file.
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FILE = re.compile(r".*\.(jsonl?|ndjson|txt|csv|tsv|parquet|arrow|feather|gz|bz2|xz|zst)", re.IGNORECASE)
_SAVED = ("state.json", "dataset_dict.json")  # a folder from `save_to_disk` has one of them
_PACKED = re.compile(r"\.(gz|bz2|xz|zst)$", re.IGNORECASE)
_KINDS = {".jsonl": "JSON", ".json": "JSON", ".ndjson": "JSON", ".parquet": "Parquet", ".arrow": "Arrow"}
_KINDS |= {".feather": "Arrow", ".csv": "CSV", ".tsv": "TSV"}
_MAGIC = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow"}


class RecordSource(ABC):
    """Records in a fixed order. Errors call the source by its `name`."""

    name: str

    def __iter__(self) -> Iterator[Record]:
        """All records, from the first. Raises DataError."""
        return (record_of(where, value, folder=folder) for where, value, folder in self.rows())

    @abstractmethod
    def rows(self) -> Iterator[tuple[str, Any, str | None]]:
        """(name in errors, value, the folder that images' paths are relative to) of each record, unchecked. Raises
        DataError."""

    @abstractmethod
    def fingerprint(self) -> str | None:
        """Changes whenever the records do. None: unknown, so nothing made from them may be kept for a later run."""


class RecordFiles(RecordSource):
    """Files of one kind, one after the other: JSON, or a kind of table."""

    def __init__(self, paths: Sequence[str | os.PathLike], name: str | None = None, kind: str = "JSON") -> None:
        """`name`: of a folder; by default the first file's."""
        self.paths, self.name, self.kind = paths, str(paths[0]) if name is None else name, kind

    def rows(self) -> Iterator[tuple[str, Any, str | None]]:
        for path in self.paths:
            values = read_json(path) if self.kind == "JSON" else read_table(path, self.kind)
            yield from ((*row, os.path.dirname(path)) for row in _not_empty(str(path), values))

    def fingerprint(self) -> str:
        """Path, size and both times. The inode's change time can't be set by hand, so it also detects a file that was
        replaced, or edited with its date kept. Raises DataError."""
        lines = []
        for path in self.paths:
            with _reading(path):
                status = os.stat(path)
            lines.append(f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
        return "\n".join(lines)


class RecordRows(RecordSource):
    """Any table: an iterable of dicts that can be iterated more than once."""

    def __init__(self, table: Any, name: str, fingerprint: str | None = None, folder: str | None = None) -> None:
        self.table, self.name, self._fingerprint, self.folder = table, name, fingerprint, folder

    def rows(self) -> Iterator[tuple[str, Any, str | None]]:
        rows = ((f"{self.name}, row {row}", without_nulls(each)) for row, each in enumerate(self.table))
        return ((*row, self.folder) for row in _not_empty(self.name, rows))

    def fingerprint(self) -> str | None:
        return self._fingerprint


class RenamedRecords(RecordSource):
    """The records of `source`, each with the fields that `columns` names, by new name, under these names."""

    def __init__(self, source: RecordSource, columns: Mapping[str, str]) -> None:
        self.name, self._source, self._columns = source.name, source, dict(columns)

    def rows(self) -> Iterator[tuple[str, Any, str | None]]:
        for where, value, folder in self._source.rows():
            yield where, self._renamed(where, value) if isinstance(value, dict) else value, folder

    def _renamed(self, where: str, fields: dict[str, Any]) -> dict[str, Any]:
        old = {*self._columns.values()}
        for name, column in self._columns.items():
            if column not in fields:
                raise DataError(f"{where}: there is no {column!r} for --map {name}={column}; it has {names_of(fields)}")
            if name in fields and name not in old:
                raise DataError(
                    f"{where}: has {name!r} already, so --map {name}={column} makes two: rename that one too, as in "
                    f"--map {name}={column},other={name}"
                )
        made = {name: value for name, value in fields.items() if name not in old}
        made |= {name: fields[column] for name, column in self._columns.items()}
        return made if getattr(self._source, "kind", None) == "JSON" else without_nulls(made)

    def fingerprint(self) -> str | None:
        found = self._source.fingerprint()
        return None if found is None else f"{found}\n{sorted(self._columns.items())}"


def open_source(name: str, columns: Mapping[str, str] | None = None) -> RecordSource:
    """`_opened`, with the fields that `columns` names, by new name, under these names."""
    source = _opened(name)
    return RenamedRecords(source, columns) if columns else source


def _opened(name: str) -> RecordSource:
    """The source of that name: a file; `folder[:split]`, of files or saved by `save_to_disk`; or `hub-id[:split]`
    or `hub-id:configuration:split`, a data set on the hub. The split is "train" by default.

    Raises DataError, also if a required library is not installed.
    """
    if not name or "\0" in name:
        raise DataError(f"{name!r} names no data; give a file, a folder or a hub id")
    if os.path.isdir(name):
        return _from_folder(name, None)
    if os.path.exists(name):
        return RecordFiles([name], kind=_kind_of_file(name))
    local, _, split = name.rpartition(":")
    if local and os.path.isdir(local):
        return _from_folder(local, split)
    if local and os.path.exists(local):
        raise DataError(f"{local} is one file without splits; leave out ':{split}'")
    if (hub_id := hub_id_of(name)) is None:
        raise DataError(f"{name} cannot be read: No such file or directory")
    configuration, _, split = name[len(hub_id) + 1 :].rpartition(":")
    return _from_hub(name, hub_id, configuration or None, split or "train")


def hub_id_of(name: str) -> str | None:
    """The id in the name of a data set on the hub; None for local files."""
    place, is_local = name.partition(":")[0], any(map(os.path.exists, (name, name.rpartition(":")[0])))
    return None if is_local or _FILE.fullmatch(place) or not _HUB_ID.fullmatch(place) else place


def _kind_of_file(path: str) -> str:
    """The kind by the file's first bytes, else by its name. Raises DataError."""
    named = _named_kind(path)
    with _reading(path), opened(path) as raw:
        head = raw.read(512)
        raw.seek(0)
        packed = unpacked(raw, path) is not raw
    if packed and named in LOADED:
        raise DataError(f"{path} is a packed {named} file, which can't be read in parts; unpack it")
    kind = next((kind for begin, kind in _MAGIC.items() if head.startswith(begin)), named or "JSON")
    is_utf_16 = head[:2] in (b"\xff\xfe", b"\xfe\xff")  # which the reader names
    if kind not in LOADED and not packed and b"\0" in head and not is_utf_16:
        raise DataError(f"{path} is no text: give JSON lines, JSON, CSV, Parquet or Arrow")
    return kind


def _named_kind(path: str) -> str | None:
    return _KINDS.get(Path(_PACKED.sub("", path)).suffix.lower())


def _from_folder(folder: str, split: str | None) -> RecordSource:
    if any(Path(folder, name).exists() for name in _SAVED):
        return _from_saved(folder, split)
    name = folder if split is None else f"{folder}:{split}"
    paths = _of_split(folder, split, _splits_of(folder))
    kinds = {_named_kind(path): os.path.relpath(path, folder) for path in reversed(paths)}
    if len(kinds) > 1:
        mixed = " and ".join(f"{kind} ({path})" for kind, path in sorted(kinds.items()))
        raise DataError(f"{folder} mixes {mixed}; keep files of one kind in a folder")
    (kind,) = kinds
    return RecordFiles(paths, name, kind)


def _splits_of(folder: str) -> dict[str, list[str]]:
    """The files of data in `folder` and below it, sorted, by the splits that their paths name. Raises DataError."""
    data_files = library("datasets.data_files", f"{folder} is a folder of files")
    root = os.path.abspath(folder)
    try:
        patterns = data_files.get_data_patterns(glob.escape(root))
        found = data_files.DataFilesDict.from_patterns(patterns, base_path=glob.escape(root))
    except FileNotFoundError:
        found = {}
    splits = {
        split: sorted({os.path.join(folder, os.path.relpath(path, root)) for path in paths if _named_kind(path)})
        for split, paths in found.items()
    }
    if not any(splits.values()):
        raise DataError(f"{folder} holds no data; give a folder with files of {', '.join(_KINDS)}")
    return {split: paths for split, paths in splits.items() if paths}


def _from_saved(folder: str, split: str | None) -> RecordSource:
    datasets = library("datasets", f"{folder} is a data set of `save_to_disk`")
    loaded = _load(folder, lambda: datasets.load_from_disk(folder))
    if isinstance(loaded, datasets.DatasetDict):
        return _rows(_of_split(folder, split, loaded), f"{folder}:{split or 'train'}", folder)
    if split is not None:
        raise DataError(f"{folder} is one data set without splits; leave out ':{split}'")
    return _rows(loaded, folder, folder)


def _of_split(folder: str, split: str | None, splits: Mapping[str, Any]) -> Any:
    wanted = split or "train"
    if wanted not in splits:
        files = {
            name: f" ({os.path.basename(each[0])}{' and others' * (len(each) > 1)})"
            for name, each in splits.items()
            if type(each) is list
        }
        choices = ", ".join(f"{Path(folder)}:{name}{files.get(name, '')}" for name in splits)
        only = ", as names of files say; files without such a name are left out" if files else ""
        raise DataError(f"{folder} has no split {wanted!r}{only}; give one of {choices}")
    return splits[wanted]


def _from_hub(name: str, hub_id: str, configuration: str | None, split: str) -> RecordSource:
    taken = f"{name} is not a local file, so it was taken for a data set on the hub"
    problem = hub_problem()  # before the import, when the library reads whether it is offline
    datasets = library("datasets", taken)
    try:
        return _rows(_load(name, lambda: datasets.load_dataset(hub_id, configuration, split=split)), name)
    except DataError as error:
        raise error if problem is None else DataError(f"{taken}, and can't be read: {problem}") from error


def _rows(loaded: Any, name: str, folder: str | None = None) -> RecordRows:
    # Private by name, but documented as the key of a data set's cache; without it nothing is kept.
    fingerprint = getattr(loaded, "_fingerprint", None)
    keep_encoded(loaded.info.features)
    return RecordRows(loaded, name, fingerprint, folder)


def _load(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # from the network, the hub, arrow, the file system
        reason = " ".join(str(error).split())[:500]
        raise DataError(f"{name} cannot be read as a data set: {reason}") from error


@contextmanager
def _reading(path: str | os.PathLike) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _not_empty(name: str, rows: Iterator[Value]) -> Iterator[Value]:
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise DataError(f"{name} is empty; it needs at least one record")
