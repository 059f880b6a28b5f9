"""Kernels that are wrong on purpose, one fault each, as cases for `bench.kernels.aot`, which must find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from bench.kernels.code import Case
from odc_kernels.device import dot, peer_address, wait_for_shard


@triton.jit
def product(x, w, y, columns, B_T: tl.constexpr, B_N: tl.constexpr, B_K: tl.constexpr, STAGES: tl.constexpr):
    t, n, k = tl.arange(0, B_T).to(tl.int64), tl.arange(0, B_N).to(tl.int64), tl.arange(0, B_K)
    acc = tl.zeros((B_T, B_N), dtype=tl.float32)
    for start in tl.range(0, columns, B_K, num_stages=STAGES):
        x_TK = tl.load(x + t[:, None] * columns + (start + k)[None, :])
        w_NK = tl.load(w + n[:, None] * columns + (start + k)[None, :])
        acc = dot(x_TK, tl.trans(w_NK), acc, False)
    tl.store(y + t[:, None] * columns + n[None, :], acc)


@triton.jit
def copy_unaligned(table, out, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(tl.load(table).to(tl.pointer_type(DTYPE)) + at))


@triton.jit
def copy_narrow(source, out, rows, columns, BLOCK: tl.constexpr):
    for row in range(rows):
        at = row * columns + tl.arange(0, BLOCK)
        tl.store(out + row.to(tl.int64) * columns + tl.arange(0, BLOCK), tl.load(source + at))


@triton.jit
def copy_flat(source, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at, mask=at < count))


@triton.jit
def add_on_this_gpu(source, table, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(peer_address(table, 0, tl.float32) + at, tl.load(source + at), sem="relaxed", scope="gpu")


@triton.jit
def read_before_wait(w, out, flags, status, epoch, BLOCK: tl.constexpr, BULK: tl.constexpr, EARLY: tl.constexpr):
    at = tl.arange(0, BLOCK)
    shard = tl.make_tensor_descriptor(w, [BLOCK], [1], [BLOCK])
    rows = tl.zeros((BLOCK,), dtype=tl.float32)
    if EARLY:
        rows = tl.load(w + at)
    wait_for_shard(flags, status, 0, epoch, 1000)
    if BULK:
        rows = shard.load([0])
    tl.store(out + at, rows)


def cases() -> Iterator[Case]:
    pointers = ("x", "w", "y", "table", "source", "out", "columns")

    def case(name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], **more: Any) -> Case:
        aligned = tuple(argument for argument in signature if argument in pointers)
        return Case(name=name, kernel=kernel, signature=signature, constants=constants, aligned=aligned, **more)

    data = {"x": "*bf16", "w": "*bf16", "y": "*fp32", "columns": "i32"}
    yield case("spills", product, data, {"B_T": 256, "B_N": 256, "B_K": 64, "STAGES": 2}, num_warps=4)
    yield case("2 bytes", copy_unaligned, {"table": "*i64", "out": "*bf16"}, {"DTYPE": tl.bfloat16, "BLOCK": 1024})
    sizes = {"rows": "i32", "columns": "i32"}
    yield case("copy_narrow", copy_narrow, {"source": "*fp32", "out": "*fp32", **sizes}, {"BLOCK": 512})
    yield case("copy_flat", copy_flat, {"source": "*fp32", "out": "*fp32", "count": "i32"}, {"BLOCK": 512}, flat=True)
    adds = {"source": "*fp32", "table": "*i64"}
    yield case("scope", add_on_this_gpu, adds, {"BLOCK": 512}, reduces=True)
    wait = {"w": "*fp32", "out": "*fp32", "flags": "*i32", "status": "*i32", "epoch": "i32"}
    for name, bulk, early in (("early", False, True), ("unfenced", True, False)):
        constants = {"BLOCK": 512, "BULK": bulk, "EARLY": early}
        yield case(name, read_before_wait, wait, constants, waits=True)
