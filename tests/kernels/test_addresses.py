"""Addresses past 2^31 elements: the arithmetic in every kernel's code, and flat copies, without such an allocation."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from tests.support import place  # isort: skip

import triton.language as tl

from bench.kernels.addresses import faults_of_offsets
from odc_kernels.gather import gather_kernel
from odc_kernels.scatter import scatter_kernel

pytestmark = place.MARKS

BLOCK = 256


TTIR = """
tt.func public @kernel(%p: !tt.ptr<f32>, %a: i32, %b: i32, %on: i1) attributes {{noinline = false}} {{
  %c8 = arith.constant 8 : i32
  %wide = arith.extsi %a : i32 to i64
  {lines}
  %q = tt.addptr %p, %at : !tt.ptr<f32>, {kind} loc(#loc)
  tt.return
}}
"""
NARROW = ["32-bit address arithmetic: %n = arith.muli %a, %b : i32"]


@pytest.mark.parametrize(
    ("lines", "kind", "faults"),
    [
        ("%at = arith.muli %a, %c8 : i32", "i32", []),
        ("%n = arith.muli %a, %b : i32\n%at = arith.extsi %n : i32 to i64", "i64", NARROW),
        # Out of one half of a branch, by the second of two results.
        (
            "%n = arith.muli %a, %b : i32\n%r:2 = scf.if %on -> (i32, i32) {\nscf.yield %a, %b : i32, i32\n} else {\n"
            "scf.yield %a, %n : i32, i32\n}\n%at = arith.addi %r#1, %c8 : i32",
            "i32",
            NARROW,
        ),
        # Carried round a loop, and into a loop as its bound.
        (
            "%at = scf.for %i = %a to %b step %c8 iter_args(%s = %c8) -> (i32)  : i32 {\n"
            "%n = arith.muli %a, %b : i32\n%t = arith.addi %s, %n : i32\nscf.yield %t : i32\n}",
            "i32",
            NARROW,
        ),
        (
            "%n = arith.muli %a, %b : i32\nscf.for %at = %n to %b step %c8  : i32 {\n"
            "%q0 = tt.addptr %p, %at : !tt.ptr<f32>, i32\n}\n%at = arith.addi %a, %b : i32",
            "i32",
            NARROW,
        ),
        # Through both halves of a `while`.
        (
            "%at = scf.while (%s = %c8) : (i32) -> i32 {\n%g = arith.cmpi slt, %s, %b : i32\n"
            "scf.condition(%g) %s : i32\n} do {\n^bb0(%u: i32 loc(#loc)):\n%n = arith.muli %a, %b : i32\n"
            "%t = arith.addi %u, %n : i32\nscf.yield %t : i32\n}",
            "i32",
            NARROW,
        ),
        ("%at = tt.call @other(%a) : (i32) -> i32", "i32", ["addresses are not followed through tt.call"]),
        ("cf.br ^bb1(%a : i32)\n^bb1(%at: i32):", "i32", ["addresses are not followed through cf.br"]),
    ],
)
def test_products_are_followed_through(lines: str, kind: str, faults: list[str]) -> None:
    assert faults_of_offsets(TTIR.format(lines=lines, kind=kind)) == faults


def far(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of which only those pages that are touched take memory; on a GPU a real one."""
    if not place.INTERPRETED:
        return torch.empty(elements, dtype=dtype, device=place.DEVICE)
    descriptor = os.memfd_create("far")
    try:
        os.ftruncate(descriptor, elements * dtype.itemsize)
        return torch.frombuffer(mmap.mmap(descriptor, elements * dtype.itemsize), dtype=dtype)
    finally:
        os.close(descriptor)


# Of two owners the second has one row of 2^16 elements, which begins 2^31 elements into the whole.
SIZES = {"rows": 2**15 + 1, "rows_per_owner": 2**15, "row_elements": 2**16, "rank": 0, "world": 2}


def test_gather_past_two_to_the_31() -> None:
    row, out = torch.randn(2**16).bfloat16(), far(2**31 + 2**16, torch.bfloat16)
    table = torch.tensor([0, row.data_ptr()])
    # One program: rank 0 begins with the first elements of owner 1.
    gather_kernel[(1, 1)](table, out, **SIZES, DTYPE=tl.bfloat16, ALIGNED=True, BLOCK=BLOCK)
    assert torch.equal(out[2**31 :][:BLOCK], row[:BLOCK])


def test_scatter_past_two_to_the_31() -> None:
    row, gradient = torch.zeros(2**16), far(2**31 + 2**16, torch.bfloat16)
    gradient[2**31 :][:BLOCK] = 3.0
    table = torch.tensor([0, row.data_ptr()])
    scatter_kernel[(1, 1)](table, gradient, 0.5, **SIZES, factor=1.0, largest=None, ALIGNED=True, BLOCK=BLOCK)
    assert torch.equal(row[:BLOCK], torch.full((BLOCK,), 1.5))
    assert not row[BLOCK:].any()
