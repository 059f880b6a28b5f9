"""A file that other processes see either whole or not at all."""

from __future__ import annotations

import os
import secrets
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
