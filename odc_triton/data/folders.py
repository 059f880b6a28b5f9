"""Files of data in a folder: their kind, and the split that their names say."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .json_files import opened, unpacked
from .records import DataError

_PACKED = re.compile(r"\.(gz|bz2|xz|zst)$", re.IGNORECASE)
_KINDS = {
    ".jsonl": "JSON",
    ".json": "JSON",
    ".ndjson": "JSON",
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".csv": "CSV",
    ".tsv": "TSV",
}
_MAGIC = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow"}
_NOT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# As the library `datasets` has them: a split's name, and what it is called in the names of files and folders.
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def kind_of_file(path: str | os.PathLike) -> str:
    """ "JSON", or a key of `tables.KINDS`: by how the file begins, else by its name. Raises DataError."""
    named = _named_kind(Path(path))
    try:
        with opened(path) as raw:
            head = raw.read(512)
            raw.seek(0)
            packed = unpacked(raw, path) is not raw
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if packed and named in ("Parquet", "Arrow"):
        raise DataError(f"{path} is a packed {named} file, which can't be read in parts; unpack it")
    if head.startswith(b"PK\x03\x04"):
        raise DataError(f"{path} is a zip archive, as .npz files are; give the files that it holds or was made from")
    kind = next((kind for begin, kind in _MAGIC.items() if head.startswith(begin)), named or "JSON")
    is_utf_16 = head[:2] in (b"\xff\xfe", b"\xfe\xff")  # which the reader names
    if kind == "JSON" and not packed and b"\0" in head and not is_utf_16:
        raise DataError(f"{path} is no text: give JSON lines, JSON, CSV, Parquet or Arrow")
    return kind


def files_of(folder: str, split: str | None) -> tuple[str, list[Path]]:
    """(the kind, the files) of data in `folder` and below it, sorted by their paths. Others are left out.

    If files or folders are called after splits, those of `split` are taken, "train" by default; files that are called
    after none are of "train". Raises DataError for files of several kinds, and where none is left.
    """
    below = [Path(root, name).relative_to(folder) for root, _, names in os.walk(folder) for name in names]
    found = sorted(
        path
        for path in below
        if _named_kind(path) and path.name not in _NOT_DATA and not any(part.startswith(".") for part in path.parts)
    )
    if not found:
        raise DataError(f"{folder} holds no data; give a folder with files of {', '.join(_KINDS)}")
    splits: dict[str, list[Path]] = {}
    for path in found:
        splits.setdefault(_split_of(path), []).append(path)
    wanted = split or "train"
    if wanted not in splits:
        choices = ", ".join(f"{Path(folder)}:{each}" for each in splits)
        raise DataError(f"{folder} has no files of the split {wanted!r}; give one of {choices}")
    kinds = {_named_kind(path): path for path in reversed(splits[wanted])}
    if len(kinds) > 1:
        named = " and ".join(f"{kind} ({path})" for kind, path in sorted(kinds.items()))
        raise DataError(f"{folder} mixes {named}; keep files of one kind in a folder")
    return next(iter(kinds)), [Path(folder, path) for path in splits[wanted]]


def _named_kind(path: Path) -> str | None:
    return _KINDS.get(Path(_PACKED.sub("", path.name)).suffix.lower())


def _split_of(path: Path) -> str:
    words = re.split(r"[^a-z]+", path.as_posix().lower())
    return next((split for word in words for split, names in _SPLITS.items() if word in names), "train")
