"""A folder that other processes see either whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_aside(path: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Makes a folder beside `path` to fill, which becomes `path`, on the disk, when the block ends well.

    If the block raises, `path` is left as it was and nothing stays beside it. Missing parents are made. Raises
    FileExistsError if there is something in `path` already, unless it is to be replaced.
    """
    path = Path(path)
    if not overwrite and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already and is not empty: give another folder, or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    stem = f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}"
    aside, old = path.with_name(f"{stem}.new"), path.with_name(f"{stem}.old")
    aside.mkdir()
    try:
        yield aside
        for folder, _, files in os.walk(aside):
            for name in files:
                with open(Path(folder) / name, "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(aside, path)
        except OSError:
            if old.exists():
                os.rename(old, path)
            raise
        sync_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Has what was made, renamed and removed in a folder be on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
