"""Files and folders that other processes see either whole or not at all; where models come from."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Opens a binary file beside `path` and renames it to `path` when the block ends well.

    If the block raises, `path` is left as it was and nothing stays beside it. Missing folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its mode 0600 would hide the result from the other users of a shared folder.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(scratch, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def write_file(path: str | os.PathLike, data: bytes) -> None:
    """Writes `data` as `atomic_file` does, into a folder that is there.

    Raises FileNotFoundError or NotADirectoryError if the folder is none, IsADirectoryError if `path` is a folder,
    PermissionError if the folder can't be written to. What was at `path` is then left as it was.
    """
    path = Path(path)
    if not path.parent.exists():
        raise FileNotFoundError(f"can't write {path}: there is no folder {path.parent}; create it first")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"can't write {path}: {path.parent} is not a folder; choose another path")
    if path.is_dir():
        raise IsADirectoryError(f"can't write {path}: it is a folder; add a file name")
    try:
        with atomic_file(path) as file:
            file.write(data)
    except PermissionError as error:
        raise PermissionError(
            f"can't write {path}: no permission to write to the folder {path.parent}; "
            "choose another folder or change its permissions"
        ) from error


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


def require_source(source: str) -> None:
    """Raises FileNotFoundError for what can only be a path, and is not there; what may be a hub's name passes."""
    path = Path(source)
    is_path = path.is_absolute() or source.startswith(".") or len(path.parts) > 2 or path.suffix == ".json"
    if not path.exists() and (is_path or (len(path.parts) == 2 and path.parent.is_dir())):
        raise FileNotFoundError(f"{source}: there is no such file or folder")


@contextlib.contextmanager
def reading(source: str) -> Iterator[None]:
    """Around what transformers reads of `source`: an error says what `source` was taken for, and what helps here.

    Raises OSError, as `require_source` too, and ValueError.
    """
    require_source(source)
    try:
        yield
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):  # which no command here takes
            raise ValueError(
                f"{source} brings code of its own (auto_map in its configuration), and odc-triton runs no code from a "
                "model's folder: give a model that transformers knows by itself"
            ) from error
        if Path(source).exists():
            raise
        reason = " ".join(str(error).split())[:300]
        raise OSError(
            f"{source} is no file or folder here, so it was taken for a name on the hub, and can't be read: {reason}"
        ) from error
