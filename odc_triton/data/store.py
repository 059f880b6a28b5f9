"""Arrays on disk: written as they grow, one uncompressed `.npz` at the end, read back by memory mapping.

Plain `np.load` reads the file too. Members begin at multiples of 64 bytes, so their arrays are aligned.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from array import array
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np

from ..base.files import atomic_file

_CHUNK = 1 << 20  # bytes copied, or kept in memory, at a time
_ALIGN = 64
_ZIP64_EXTRA = 20  # bytes that zipfile itself adds to a member's header
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_PADDING_ID = 0x4F44  # of our extra field; readers skip fields that they do not know


class GrowingArrays:
    """Named columns of integers. They grow in unnamed files, which vanish with the process however it ends."""

    def __init__(self, folder: str | os.PathLike, typecodes: Mapping[str, str]) -> None:
        """`typecodes`: those of the module `array`, "i" for int32 and "q" for int64. Missing folders are created."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._typecodes = dict(typecodes)
        self._pending = {name: array(typecode) for name, typecode in self._typecodes.items()}
        self._stack = ExitStack()
        self._files: dict[str, BinaryIO] = {
            name: self._stack.enter_context(TemporaryFile(dir=folder))  # noqa: SIM115 - the stack closes it
            for name in self._typecodes
        }

    def __enter__(self) -> GrowingArrays:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def extend(self, name: str, values: Iterable[int]) -> None:
        pending = self._pending[name]
        pending.extend(values)
        if len(pending) * pending.itemsize > _CHUNK:
            self._flush(name)

    def save(self, path: str | os.PathLike, shapes: Mapping[str, tuple[int, ...]], meta: dict[str, Any]) -> None:
        """Writes all columns with these shapes, and `meta` as JSON, atomically."""
        with atomic_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, column in self._files.items():
                self._flush(name)
                column.seek(0)
                dtype = np.dtype(self._typecodes[name])
                _write_member(file, archive, name, dtype, shapes[name], iter(lambda c=column: c.read(_CHUNK), b""))
            _write_meta(file, archive, meta)

    def _flush(self, name: str) -> None:
        self._files[name].write(self._pending[name].tobytes())
        del self._pending[name][:]


def save_arrays(path: str | os.PathLike, arrays: Mapping[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Writes arrays and `meta` as JSON, atomically."""
    with atomic_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, values in arrays.items():
            flat = values.reshape(-1)
            rows = _CHUNK // values.itemsize
            chunks = (flat[start : start + rows].tobytes() for start in range(0, flat.size, rows))
            _write_member(file, archive, name, values.dtype, values.shape, chunks)
        _write_meta(file, archive, meta)


def map_arrays(path: str | os.PathLike, names: Iterable[str], *, verify: bool) -> tuple[dict[str, np.ndarray], Any]:
    """(read-only arrays mapped from the file, meta). `verify` reads all of it once and compares its checksums.

    Nothing in the file is ever unpickled. Raises OSError, or what the readers of zip, npy and JSON raise.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # opening a FIFO would wait for a writer
        raise ValueError(f"{path} is not a file")
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        if verify and (damaged := archive.testzip()):
            raise ValueError(f"the checksum of {damaged} is wrong")
        with archive.open("meta.npy") as member:
            meta = json.loads(str(np.lib.format.read_array(member, allow_pickle=False)))
        return {name: _map_member(file, archive.getinfo(f"{name}.npy")) for name in names}, meta


def contents(path: str | os.PathLike) -> str:
    """A digest of the arrays in a file, computed from its checksums: the same wherever the file is."""
    with zipfile.ZipFile(path) as archive:
        members = [(each.filename, each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(members).encode()).hexdigest()[:32]


def _write_meta(file: BinaryIO, archive: zipfile.ZipFile, meta: dict[str, Any]) -> None:
    text = np.array(json.dumps(meta))
    _write_member(file, archive, "meta", text.dtype, (), iter([text.tobytes()]))


def _write_member(
    file: BinaryIO,
    archive: zipfile.ZipFile,
    name: str,
    dtype: np.dtype,
    shape: tuple[int, ...],
    chunks: Iterable[bytes],
) -> None:
    info = zipfile.ZipInfo(f"{name}.npy")  # its date is fixed: the same samples give the same bytes
    info.external_attr = 0o644 << 16
    begin = file.tell() + _LOCAL_HEADER.size + len(info.filename) + _ZIP64_EXTRA + 4
    padding = -begin % _ALIGN
    info.extra = struct.pack("<HH", _PADDING_ID, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as member:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        for chunk in chunks:
            member.write(chunk)


def _map_member(file: BinaryIO, info: zipfile.ZipInfo) -> np.ndarray:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise ValueError(f"{info.filename} is compressed")
    file.seek(info.header_offset)
    *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    begin = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    file.seek(begin)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"{info.filename} is not an array of version 1.0")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject or fortran:
        raise ValueError(f"{info.filename} has Python objects or Fortran order")
    offset = file.tell()
    values = int(np.prod(shape, dtype=object))  # object: no overflow
    if offset - begin + values * dtype.itemsize != info.file_size:
        raise ValueError(f"{info.filename} has {info.file_size} bytes, not those of {shape} {dtype}")
    if not values:
        return np.empty(shape, dtype)  # an empty range can't be mapped
    return np.asarray(np.memmap(file, dtype, "r", offset, shape))
