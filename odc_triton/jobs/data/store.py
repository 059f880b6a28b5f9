"""Arrays on disk: an uncompressed `.npz`, written atomically, read back by memory mapping.

Plain `np.load` reads the file too. Members begin at multiples of 64 bytes, so their arrays are aligned.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import struct
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np

from ...base.files import atomic_file

_ALIGN = 64
_HEADER = 30  # bytes of a member's header before its name
_ZIP64_EXTRA = 20  # that zipfile itself adds to it
_PADDING_ID = 0x4F44  # of our extra field; readers skip unknown fields
Column = tuple[BinaryIO, np.dtype, tuple[int, ...]]  # the file that holds an array's bytes, its type, its shape


def save_arrays(path: str | os.PathLike, columns: Mapping[str, Column], meta: dict[str, Any]) -> None:
    """Writes columns and `meta` as JSON, atomically, in chunks."""
    text = np.array(json.dumps(meta))
    with atomic_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, (values, dtype, shape) in {**columns, "meta": column_of(text)}.items():
            info = zipfile.ZipInfo(f"{name}.npy")  # its date is fixed: the same samples give the same bytes
            info.external_attr = 0o644 << 16
            padding = -(file.tell() + _HEADER + len(info.filename) + _ZIP64_EXTRA + 4) % _ALIGN
            info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
            with archive.open(info, "w", force_zip64=True) as member:
                header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                values.seek(0)
                shutil.copyfileobj(values, member)


def column_of(array: np.ndarray) -> Column:
    return io.BytesIO(array.tobytes()), array.dtype, array.shape


def map_arrays(
    path: str | os.PathLike, names: Iterable[str], *, optional: Iterable[str] = (), verify: bool
) -> tuple[dict[str, np.ndarray], Any]:
    """(read-only arrays mapped from the file, meta). Of `optional` ones those that the file has. `verify` reads the
    whole file once and compares its checksums.

    Nothing in the file is ever unpickled. Raises OSError, and the errors of the readers of zip, npy and JSON.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # opening a FIFO would wait for a writer
        raise ValueError(f"{path} is not a file")
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        if verify and (damaged := archive.testzip()):
            raise ValueError(f"the checksum of {damaged} is wrong")
        with archive.open("meta.npy") as member:
            meta = json.loads(str(np.lib.format.read_array(member, allow_pickle=False)))
        names = [*names, *(name for name in optional if f"{name}.npy" in archive.namelist())]
        return {name: _map_member(file, archive.getinfo(f"{name}.npy")) for name in names}, meta


def contents(path: str | os.PathLike) -> str:
    """A digest of the arrays in a file, from its checksums; independent of the file's path."""
    with zipfile.ZipFile(path) as archive:
        members = [(each.filename, each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(members).encode()).hexdigest()[:32]


def _map_member(file: BinaryIO, info: zipfile.ZipInfo) -> np.ndarray:
    file.seek(info.header_offset + _HEADER - 4)
    begin = info.header_offset + _HEADER + sum(struct.unpack("<2H", file.read(4)))  # of the name, of extra fields
    file.seek(begin)
    np.lib.format.read_magic(file)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    offset = file.tell()
    is_plain = info.compress_type == zipfile.ZIP_STORED and not fortran and not dtype.hasobject
    if not is_plain or offset - begin + math.prod(shape) * dtype.itemsize != info.file_size:
        raise ValueError(f"{info.filename} is no plain array of {shape} {dtype}")
    return np.asarray(np.memmap(file, dtype, "r", offset, shape)) if math.prod(shape) else np.empty(shape, dtype)
