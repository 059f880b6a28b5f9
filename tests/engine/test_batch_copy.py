"""A unit's copies by few calls of the CUDA runtime: the call's real arguments, read by a stand-in for the runtime."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_void_p
from typing import Any

import pytest
import torch

from odc_kernels.batch_copy import Batch, BatchCopy
from odc_kernels.peers import shards_of
from odc_triton.comm.layout import ParameterSpec
from odc_triton.engine.gathered import GatheredParameters
from odc_triton.engine.transport import DeviceStreams
from tests.support.simulated import SimulatedDevice

INVALID = 1
VERSIONS = pytest.mark.parametrize("version", [12080, 13000])
_ARGUMENTS = [POINTER(c_void_p), POINTER(c_void_p), POINTER(c_size_t), c_size_t, c_void_p, POINTER(c_size_t), c_size_t]


class Runtime:
    """Stands for libcudart: C functions as cuda_runtime_api.h of 12.8, 12.9 and 13.0 declares them, which copy at once
    from and to the CPU's memory. It refuses what CUDA refuses, and notes each call: (stream, [(size, flags)]).
    """

    def __init__(self, version: int, driver: int = 13000) -> None:
        self.calls: list[tuple[int, list[tuple[int, int]]]] = []
        self.last_error = 0
        tells_failed = version < 13000
        arguments = [*_ARGUMENTS, *([POINTER(c_size_t)] if tells_failed else []), c_void_p]
        self.cudaMemcpyBatchAsync = CFUNCTYPE(c_int, *arguments)(self._copy if tells_failed else self._copy_13)
        self.cudaRuntimeGetVersion, self.cudaDriverGetVersion = _tells(version), _tells(driver)
        self._words = ctypes.create_string_buffer(b"invalid argument")
        self.cudaGetErrorString = CFUNCTYPE(c_void_p, c_int)(lambda _: ctypes.addressof(self._words))
        self.cudaGetLastError = CFUNCTYPE(c_int)(self._forget)

    def _copy_13(self, *arguments: Any) -> int:
        return self._copy(*arguments[:7], [0], arguments[7])

    def _copy(
        self, to: Any, of: Any, sizes: Any, count: int, attrs: int, firsts: Any, kinds: int, failed: Any, stream: Any
    ) -> int:
        starts = [firsts[kind] for kind in range(kinds)]
        # cudaMemcpyAttributes: srcAccessOrder, two locations of two ints, flags.
        attributes = list(struct.iter_unpack("5iI", ctypes.string_at(attrs, 24 * kinds)))
        if (
            not count
            or stream in (None, 1)
            or starts[:1] != [0]
            or starts != sorted(set(starts))
            or starts[-1] >= count
        ):
            return self._fail()
        made = []
        for copy in range(count):
            order, *hints, flags = attributes[sum(start <= copy for start in starts) - 1]
            if order != 1 or any(hints) or not (to[copy] and of[copy] and sizes[copy]):
                failed[0] = copy
                return self._fail()
            made.append((sizes[copy], flags))
        for copy in reversed(range(count)):  # in no order
            ctypes.memmove(to[copy], of[copy], sizes[copy])
        self.calls.append((stream, made))
        return 0

    def _fail(self) -> int:
        self.last_error = INVALID
        return INVALID

    def _forget(self) -> int:
        error, self.last_error = self.last_error, 0
        return error


def _tells(version: int) -> Any:
    def tell(into: Any) -> int:
        into[0] = version
        return 0

    return CFUNCTYPE(c_int, POINTER(c_int))(tell)


class Device(SimulatedDevice):
    """`running`: the handle of the stream whose work is done now."""

    running = 0

    def enqueue(self, stream: Any, work: Callable[..., None], memory: Any = None) -> None:
        def on_stream(*given: Any) -> None:
            self.running = 0x1000 + self.streams.index(stream)
            work(*given)

        super().enqueue(stream, on_stream, memory)


def _unit(
    runtime: Runtime, kind: str, near: frozenset[int], by_kernel: bool = False
) -> tuple[GatheredParameters, list[torch.Tensor]]:
    """The parameters of a layer on rank 2 of 8, of which not all owners have rows."""
    device = Device(kind)
    shapes = [(16, 3), (17, 5), (3,), (1,), (0, 4), (64, 2), (9, 2, 3)]
    wholes = [torch.randn(shape).to([torch.bfloat16, torch.float32][len(shape) % 2]) for shape in shapes]
    specs = [
        ParameterSpec(
            names=("p",), shape=shape, master_dtype="float32", compute_dtype="float32", reduce_dtype="float32", unit=""
        )
        for shape in shapes
    ]
    shards = [shards_of(whole, 8) for whole in wholes]
    copy = BatchCopy.of(runtime, lambda: device.running)
    assert copy is not None
    streams = DeviceStreams(device)
    given = {"streams": streams, "near": near, "by_kernel": by_kernel, "batch_copy": copy}
    return GatheredParameters(specs, shards, rank=2, **given), wholes


@VERSIONS
@pytest.mark.parametrize("kind", ["late", "early"])
def test_a_unit_is_gathered_by_two_calls(version: int, kind: str) -> None:
    runtime = Runtime(version)
    unit, wholes = _unit(runtime, kind, near=frozenset({2}))
    for publication in range(2):
        runtime.calls.clear()
        unit.fetch("me", publication)
        unit.wait()
        for got, want in zip(unit.whole, wholes, strict=True):
            assert torch.equal(got, want)
        unit.release("me")
        (first, own_and_others), (second, others) = runtime.calls
        assert {first, second} == {0x1001, 0x1002}, "streams of their own"
        # Own rows come first, by multiprocessors; all others by copy engines.
        own = [rows.nbytes for whole in wholes if (rows := shards_of(whole, 8)[2]).numel()]
        assert own_and_others[:5] == [(size, 0) for size in own]
        assert {flags for _, flags in own_and_others[5:] + others} == {1}
        assert sum(size for size, _ in own_and_others + others) == sum(whole.nbytes for whole in wholes)


def test_what_a_kernel_gathers_is_in_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    import odc_kernels.gather

    launches = []
    monkeypatch.setattr(odc_kernels.gather, "gather_many", lambda *, shards, out: launches.append(shards.dtype))
    runtime = Runtime(13000)
    unit, _ = _unit(runtime, "early", near=frozenset({2}), by_kernel=True)
    unit.fetch("me", 1)
    assert sorted(map(str, launches)) == ["torch.bfloat16", "torch.float32"]
    assert runtime.calls == []


@VERSIONS
def test_a_refusal(version: int) -> None:
    runtime, memory = Runtime(version), torch.zeros(8)
    copy = BatchCopy.of(runtime, lambda: 0x1000)
    batch = Batch.of([(0, torch.ones(2)), (8, torch.ones(3))], near=0)
    batch.sizes[1] = 0
    which = "copy 1 of 2, 0 bytes from 0x[0-9a-f]+ to 0x[0-9a-f]+" if version < 13000 else "one of 2 copies"
    with pytest.raises(RuntimeError, match=rf"cudaMemcpyBatchAsync: invalid argument \(1\): {which}.*on stream 0x1000"):
        copy(batch, memory.data_ptr())
    assert runtime.last_error == 0, "torch would find it at its next launch"
    with pytest.raises(RuntimeError, match="one of 1 copies, on stream 0x0"):
        BatchCopy.of(runtime, lambda: 0)(Batch.of([(0, torch.ones(2))], near=1), memory.data_ptr())


def test_what_can_not_be_copied() -> None:
    for rows in (torch.zeros(4, 4)[:, :2], torch.zeros(0, 2)):
        with pytest.raises(ValueError, match="contiguous memory only"):
            Batch.of([(0, rows)], near=0)


@pytest.mark.parametrize(
    ("version", "driver", "is_there"),
    [(12060, 13000, False), (12080, 12070, False), (12080, 12080, True), (12090, 13020, True), (13000, 13000, True)],
)
def test_which_runtimes_have_it(version: int, driver: int, is_there: bool) -> None:
    assert (BatchCopy.of(Runtime(version, driver), lambda: 1) is not None) == is_there
