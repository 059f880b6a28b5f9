"""Atomic files and folders; checks on files that are read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .hub import hub_problem

_IN_THE_WAY = "is in the way: it is not a folder; remove it, or give another name"


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Opens a binary file next to `path` and renames it to `path` when the block succeeds.

    If the block raises, `path` is left as it was and nothing stays next to it. Missing folders are created.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its mode 0600 would hide the result from other users of a shared folder.
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
    """Writes `data` as `atomic_file` does. Raises OSError that names `path`, and leaves an existing file unchanged."""
    try:
        with atomic_file(path) as file:
            file.write(data)
    except OSError as error:
        raise type(error)(error.errno, f"can't write {path}: {error.strerror}") from error


_SAMPLE_BYTES = 4096


def fingerprint(path: str | os.PathLike) -> str | None:
    """A digest of a file, or of a model's folder, wherever it is; None for what is neither, such as a hub id.

    Of a folder: its config, and of each tensor in its safetensors files the name, dtype, shape and 4 KB of its bytes.
    """
    path, digest = Path(path), hashlib.sha256()
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path.is_file() else None
    for name in ("config.json", "adapter_config.json"):
        digest.update((path / name).read_bytes() if (path / name).is_file() else b"none")
    tensors = []
    for each in [each for each in path.glob("*.safetensors") if each.is_file()]:
        with (
            each.open("rb") as file,
            contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError),
        ):  # damaged, or git-lfs's pointer to it: reading it says so
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(start - 8, os.fstat(file.fileno()).st_size)))
            for name, about in sorted(header.items()):
                if name != "__metadata__":
                    first, end = about["data_offsets"]
                    file.seek(start + max(first, (first + end - _SAMPLE_BYTES) // 2))
                    values = file.read(min(end - first, _SAMPLE_BYTES))
                    tensors.append((name, about["dtype"], str(about["shape"]), values))
    for tensor in sorted(tensors):
        digest.update(repr(tensor).encode())
    return digest.hexdigest()[:32]


def require_new_folder(path: str | os.PathLike, *, remedy: str = "remove it") -> Path:
    """`path` with links resolved. Raises FileExistsError for a file, and for a folder that is not empty; OSError for a
    mount point, which can't be replaced.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and (not real.is_dir() or any(real.iterdir())):
        raise FileExistsError(f"{path} exists already and is not empty: give another folder, or {remedy}")
    _refuse_mount(path, real)
    return real


def _refuse_mount(path: str | os.PathLike, real: Path) -> None:
    if real.is_mount():
        raise OSError(f"{path} is a mount point, which can't be replaced: give a folder in it")


def require_replaceable(path: str | os.PathLike) -> None:
    """Raises OSError for what `folder_aside(path, overwrite=True)` can't replace: a file, or a mount point."""
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_dir():
        raise NotADirectoryError(f"{path} {_IN_THE_WAY}")
    _refuse_mount(path, real)


@contextmanager
def folder_aside(
    path: str | os.PathLike, *, overwrite: bool = False, replaces: Callable[[str], bool] = lambda name: True
) -> Iterator[Path]:
    """Creates a folder next to `path` to fill; when the block succeeds it is synced to disk and renamed to `path`.

    `overwrite`: of an existing folder entries go that the new one has too, or whose names it `replaces`; others stay.

    If the block raises, `path` is left as it was and nothing stays next to it; the next call removes leftovers of
    killed processes. Missing parents are created. Raises OSError; unless `overwrite`, FileExistsError as
    `require_new_folder` does, also for a folder that was created meanwhile.
    """
    given, path = path, Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left(path)
    if not overwrite:
        require_new_folder(given, remedy="overwrite=True")
    stem = f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}"
    aside, old = path.with_name(f"{stem}.new"), path.with_name(f"{stem}.old")
    aside.mkdir()
    lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # NFS can't lock folders: leftovers then stay
            fcntl.flock(lock, fcntl.LOCK_EX)  # shows that its writer lives
        yield aside
        for folder, _, files in os.walk(aside):
            for name in files:
                with open(Path(folder) / name, "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        if overwrite:
            for entry in list(path.iterdir()) if path.is_dir() else ():
                if not replaces(entry.name) and not os.path.lexists(aside / entry.name):
                    link_or_copy(entry, aside / entry.name)
            if path.is_dir():
                shutil.copymode(path, aside)
            sync_folder(aside)
            put_in_place(aside, path, former=old)
        else:
            try:
                os.rename(aside, path)  # also replaces an empty folder
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise FileExistsError(f"{given} was created by another process meanwhile, and stays as it is") from None
            sync_folder(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        os.close(lock)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """The same files under another name, so that they are never missing; copies where files can't have two."""
    if os.path.isdir(source) and not os.path.islink(source):
        shutil.copytree(source, target, symlinks=True, copy_function=link_or_copy)
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def remove_left(path: Path) -> None:
    """Removes leftovers of killed processes next to `path`; puts back a folder that they had just moved away."""
    names = re.compile(rf"\.{re.escape(path.name)}\.\d+\.[0-9a-f]{{8}}\.(new|old)")
    for left in sorted(each for each in path.parent.iterdir() if names.fullmatch(each.name)):
        with contextlib.suppress(OSError):  # its writer lives, or it is another user's
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if left.suffix == ".old" and not path.exists():
                    os.rename(left, path)
                else:
                    shutil.rmtree(left)
            finally:
                os.close(lock)


def put_in_place(aside: Path, path: Path, *, former: Path) -> None:
    """Replaces the folder `path`, if any, by the folder `aside`; the change is on disk when it returns.

    The old folder is renamed to `former` first, and is restored if a rename fails; of a link to a folder only
    the link is removed. Raises OSError; NotADirectoryError if `path` is not a folder, which then stays.
    """
    if path.is_dir():
        os.rename(path, former)
    elif os.path.lexists(path):
        raise NotADirectoryError(f"{path} {_IN_THE_WAY}")
    try:
        os.rename(aside, path)
    except BaseException:
        if former.exists() and not path.exists():
            os.rename(former, path)
        raise
    sync_folder(path.parent)
    remove_folder(former)


def remove_folder(path: Path) -> None:
    """Removes a folder, ignoring errors; of a link only the link."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Syncs a folder's entries to disk: files created, renamed and removed in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_object(path: str | os.PathLike, remedy: str) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError, and ValueError with the remedy for any other content."""
    try:
        content = json.loads(Path(path).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object: {remedy}")
    return content


def require_source(source: str) -> None:
    """Raises FileNotFoundError if `source` can only be a path and does not exist; a possible hub id passes."""
    path = Path(source)
    is_path = path.is_absolute() or source.startswith(".") or len(path.parts) > 2 or path.suffix == ".json"
    if not path.exists() and (is_path or (len(path.parts) == 2 and path.parent.is_dir())):
        raise FileNotFoundError(f"{source}: there is no such file or folder")


@contextlib.contextmanager
def reading(source: str) -> Iterator[None]:
    """In this block, errors of transformers reading `source` name what it was taken for, and the remedy.

    Raises OSError, also as `require_source` does, and ValueError.
    """
    require_source(source)
    problem = None if Path(source).exists() else hub_problem()
    try:
        yield
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):  # an option that no command here has
            raise ValueError(
                f"{source} needs its own code (auto_map in its configuration), and odc-triton runs no code from a "
                "model's folder: give a model of a class that transformers itself has"
            ) from error
        if Path(source).exists():
            raise
        reason = problem or " ".join(str(error).split())[:300]
        raise OSError(
            f"{source} is not a local file or folder, so it was taken for a hub id, and can't be read: {reason}"
        ) from error
