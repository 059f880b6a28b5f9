"""Many copies by one call of the CUDA runtime.

    cudaMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, [failIdx,] stream)

since CUDA 12.8; CUDA 13 dropped `failIdx` (CUDA Runtime API, "Memory Management"). A single copy costs the host 6 to
8 µs, and a layer of Llama on 8 GPUs needs 56. Copies of a batch are unordered. `attrs[k]` applies to the copies from
`attrsIdxs[k]` on.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

_OLDEST_CUDA, _FIRST_WITHOUT_FAILED = 12080, 13000
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream
_BESIDE_COMPUTE = 1  # cudaMemcpyFlagPreferOverlapWithCompute: by copy engines


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes. The locations are hints, irrelevant for memory allocated by CUDA."""

    _fields_ = (("srcAccessOrder", c_int), ("srcLocHint", _Location), ("dstLocHint", _Location), ("flags", c_uint))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Copies of `sizes[i]` bytes from the address `sources[i]` to `places[i]` bytes from the start of some memory.

    `attributes[k]` applies to those from `firsts[k]` on.
    """

    sources: ctypes.Array[c_void_p]
    places: tuple[int, ...]
    sizes: ctypes.Array[c_size_t]
    attributes: ctypes.Array[_Attributes]
    firsts: ctypes.Array[c_size_t]

    @classmethod
    def of(cls, copies: Sequence[tuple[int, torch.Tensor]], *, near: int) -> Batch:
        """`copies`: (place in bytes, source tensor: contiguous, not empty, kept alive by the caller).

        The first `near` are copies within one GPU, for which multiprocessors are many times as fast as a copy engine.
        Raises ValueError for a tensor that is empty or not contiguous.
        """
        for _, rows in copies:
            if not rows.is_contiguous() or not rows.nbytes:
                raise ValueError(f"can't copy {tuple(rows.shape)} with strides {rows.stride()}: contiguous memory only")
        count = len(copies)
        kinds = {0: 0, near: _BESIDE_COMPUTE} if near < count else {0: 0}  # one if `near` is 0
        attributes = [_Attributes(srcAccessOrder=_IN_STREAM_ORDER, flags=flags) for flags in kinds.values()]
        return cls(
            sources=(c_void_p * count)(*(rows.data_ptr() for _, rows in copies)),
            places=tuple(place for place, _ in copies),
            sizes=(c_size_t * count)(*(rows.nbytes for _, rows in copies)),
            attributes=(_Attributes * len(kinds))(*attributes),
            firsts=(c_size_t * len(kinds))(*kinds),
        )


class BatchCopy:
    """`cudaMemcpyBatchAsync` of a runtime, on the current stream."""

    def __init__(self, runtime: Any, version: int, current_stream: Callable[[], int]) -> None:
        """`version`: the runtime's, as 12080 for 12.8; `current_stream`: its handle."""
        self._runtime, self._current_stream = runtime, current_stream
        self._has_failed_index = version < _FIRST_WITHOUT_FAILED
        failed = [c_void_p] if self._has_failed_index else []
        self._copy = runtime.cudaMemcpyBatchAsync
        self._copy.argtypes = [c_void_p] * 3 + [c_size_t] + [c_void_p] * 2 + [c_size_t, *failed, c_void_p]
        self._copy.restype = c_int
        runtime.cudaGetErrorString.restype = c_char_p

    @classmethod
    def of(cls, runtime: Any, current_stream: Callable[[], int]) -> BatchCopy | None:
        """None if the runtime, or the driver under it, is older than CUDA 12.8."""
        versions = []
        for ask in (runtime.cudaRuntimeGetVersion, runtime.cudaDriverGetVersion):
            ask(byref(version := c_int()))
            versions.append(version.value)
        return cls(runtime, versions[0], current_stream) if min(versions) >= _OLDEST_CUDA else None

    def __call__(self, batch: Batch, memory: int) -> None:
        """Enqueues the copies to `memory`, an address, on the current stream, which must not be the default stream.

        Raises RuntimeError with CUDA's reason.
        """
        count, failed = len(batch.places), c_size_t(len(batch.places))
        targets = (c_void_p * count)(*(memory + place for place in batch.places))
        status = self._copy(
            targets,
            batch.sources,
            batch.sizes,
            count,
            batch.attributes,
            batch.firsts,
            len(batch.firsts),
            *([byref(failed)] if self._has_failed_index else []),
            self._current_stream(),
        )
        if status:
            self._runtime.cudaGetLastError()  # else torch would raise it at its next launch
            at, which = failed.value, f"one of {count} copies"
            if at < count:
                source, target, size = batch.sources[at], targets[at], batch.sizes[at]
                which = f"copy {at} of {count}, {size} bytes from {source:#x} to {target:#x}"
            why = self._runtime.cudaGetErrorString(status).decode()
            raise RuntimeError(
                f"cudaMemcpyBatchAsync: {why} ({status}): {which}, on stream {self._current_stream():#x}"
            )


@functools.cache
def torchs_batch_copy() -> BatchCopy | None:
    """Of the runtime that torch uses; None if that is too old, or not a shared library of the usual name."""
    if torch.version.cuda is None:
        return None
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    try:  # only if it is loaded: a second one would not know torch's GPU
        runtime = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    return BatchCopy.of(runtime, lambda: torch.cuda.current_stream().cuda_stream)
