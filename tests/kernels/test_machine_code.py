"""Cross-compiled machine code: products on sm_90; slowly a case of every kernel there, and some on other chips.

`make aot` reads all on all chips.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

import odc_kernels
from bench.kernels.addresses import faults_of_offsets
from bench.kernels.cases import cases as all_cases
from bench.kernels.code import Case
from odc_kernels import tiles
from tests.support.aot import compiled

_NAMES = {"t": "BLOCK_T", "n": "BLOCK_N", "k": "BLOCK_K", "group": "GROUP", "num_stages": "STAGES"}


def _function(case: Case) -> str:
    return case.kernel.fn.__name__


def _subset() -> list[str]:
    """The cases in bf16 of each kernel, or all of a kernel that has none."""
    cases = list(all_cases())
    in_bf16 = {_function(case) for case in cases if "bf16" in case.name}
    return [case.name for case in cases if "bf16" in case.name or _function(case) not in in_bf16]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "aot"


IN_HGMMA = ("linear bf16", "linear_dx bf16", "wgrad bf16", "staged bf16")
REDUCES_BY_FOUR = ("scatter bf16", "embedding_grad bf16")
FAR = "wgrad bf16 far"
EXACT = {"exact wgrad bf16": "UTMAREDG.2D.ADD", "exact scatter bf16": "REDG.E.ADD.64.STRONG.SYS"}


def test_products(out: Path) -> None:
    names = ("linear bf16", "wgrad bf16")
    failed, codes = compiled(out, "--arch", "90", "--kernel", *names)
    assert not failed  # which a 32-bit product in an address is, too
    assert all("HGMMA" in codes[name, 90]["matrix"] for name in names)
    assert "UTMAREDG.2D.ADD" in codes["wgrad bf16", 90]["reduction"]


@pytest.mark.slow
def test_machine_code_is_as_it_should_be(out: Path) -> None:
    names = [*_subset(), *IN_HGMMA, *REDUCES_BY_FOUR, *EXACT, FAR, "linear fp32 T<=64"]
    failed, codes = compiled(out, "--arch", "90", "--kernel", *names)
    assert not failed  # which a 32-bit product in an address is, too
    assert {name for name, _ in codes} >= set(names)
    assert all("HGMMA" in codes[name, 90]["matrix"] for name in IN_HGMMA)
    assert codes["linear fp32 T<=64", 90]["matrix"] == "-"
    for name, reduction in EXACT.items():
        assert codes[name, 90]["reduction"] == reduction
    for name in (*REDUCES_BY_FOUR, FAR):
        assert codes[name, 90]["reduction"] == "REDG.E.ADD.F32x4.FTZ.RN.STRONG.SYS"


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 120])
def test_other_chips(out: Path, arch: int) -> None:
    names = ("wgrad bf16", "staged bf16", "staged_dx bf16", "scatter fp16", "linear fp32 T<=64")
    failed, codes = compiled(out, "--arch", str(arch), "--kernel", *names)
    assert not failed  # which a product of fp32 in tf32 is, too
    assert codes["linear fp32 T<=64", arch]["matrix"] == "-"
    single = {80: "RED.E.ADD.F32.FTZ.RN.STRONG.SYS", 120: "REDG.E.ADD.F32x4.FTZ.RN.STRONG.SYS"}[arch]
    assert codes["scatter fp16", arch]["reduction"] == single
    assert "HMMA" in codes["wgrad bf16", arch]["matrix"]


# What each of `bad_kernels` is faulted for on sm_90: faults that no kernel has, so that only these show they are found.
BAD = {
    "spills": ["2622 spills", "every HGMMA waits for itself"],
    "2 bytes": ["scalar 2-byte loads", "no 16-byte loads"],
    "scope": ["reduces by REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU, red.global.gpu.relaxed.add.v4.f32"],
    "early": ["a weight load before the wait"],
    "unfenced": ["no proxy fence between a wait and a TMA load"],
    "copy_flat": ["no 16-byte loads", "32-bit address arithmetic: arith.muli %at, %c512_i32 : i32"],
    "copy_narrow": ["32-bit address arithmetic: arith.muli %row, %columns : i32"],
}


@pytest.mark.slow
def test_each_fault_is_found(out: Path) -> None:
    failed, codes = compiled(out / "bad", "--cases", "tests.support.bad_kernels", "--arch", "90", "--kernel", *BAD)
    assert failed == 1
    found = {name: code["faults"] for (name, _), code in codes.items()}
    # How many spills there are is the compiler's affair.
    found["spills"] = [fault.split(" ")[-1] for fault in found["spills"]]
    # Triton before 3.9 writes `atom` where 3.9 writes `red`: of both the same REDG is made.
    found["scope"] = [fault.replace(", atom.global.gpu.", ", red.global.gpu.") for fault in found["scope"]]
    for name in (name for name in BAD if name.startswith("copy")):
        found[name] = [re.sub(r"%\w+ = ", "", fault) for fault in found[name]]
    # The constant's name is its value, in triton 3.9 that of the line that it stands in.
    found["copy_flat"] = [re.sub(r"muli %\w+, %(c512_i32|at) ", "muli %at, %c512_i32 ", f) for f in found["copy_flat"]]
    assert found == BAD | {"spills": ["spills", "itself"]}


def test_every_kernel_has_cases() -> None:
    kernels = set()
    for module in iter_modules(odc_kernels.__path__):
        owner = import_module(f"odc_kernels.{module.name}")
        kernels |= {name for name in vars(owner) if name.endswith("_kernel") and hasattr(vars(owner)[name], "fn")}
    assert "wgrad_kernel" in kernels
    assert kernels == {_function(case) for case in all_cases()}


@pytest.mark.parametrize("arch", tiles.ARCHITECTURES)
@pytest.mark.parametrize("operator", sorted({name for entry in tiles.DEFAULTS for name in entry.operators}))
def test_every_default_tile_is_compiled(operator: str, arch: int) -> None:
    function = f"{operator.removesuffix('_wide')}_kernel"
    cases = [case for case in all_cases() if _function(case) == function]
    for dtype, element_bytes in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        for tokens in (1, 64, 65, 4096):
            tile = tiles.tile_of(operator, element_bytes=element_bytes, arch=arch, tokens=tokens)
            assert any(_has(case, tile, arch) for case in cases if dtype in case.name), (dtype, tokens, tile)


def _has(case: Case, tile: Any, arch: int) -> bool:
    """Whether a case is compiled with a tile on sm_`arch`; it has a constant for each size that its kernel takes."""
    constants = {"num_warps": case.num_warps, "STAGES": case.num_stages, **case.constants_on(arch)}
    return all(constants.get(_NAMES.get(name, name), size) == size for name, size in asdict(tile).items())


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
