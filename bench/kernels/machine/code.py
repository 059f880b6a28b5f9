"""What the compiler made of a kernel, and what is wrong with it.

[Note: unused results] Nobody uses the result of an addition. Triton 3.9 writes it as a `red`, which returns nothing
over the link, and before that as an `atom`, of which ptxas makes a reduction (RED on sm_80, REDG above). But ptxas
keeps the atomic (ATOMG into RZ) in a kernel that acquires a tensor map, as every kernel does that makes a tensor
descriptor: there the addition might be one end of a synchronisation. So a kernel that reduces in bulk adds nothing
else: wgrad leaves the bias to `scatter`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from odc_kernels.tiles import SHARED_LIMIT_BYTES

from .case import Case
from .offsets import faults_of_offsets

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_MATRIX_UNITS = ("HGMMA", "HMMA", "UTCHMMA", "QMMA")


@dataclass(kw_only=True)
class Code:
    """`loads`: widths in bytes, and TMA. `reduction`: instructions that add to memory. `seconds`: of CPU time."""

    name: str
    arch: int
    triton: str = triton.__version__
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    matrix: str = "-"
    loads: str = "-"
    reduction: str = "-"
    faults: list[str] = field(default_factory=list)


def build(case: Case, arch: int) -> Code:
    """Compiles a case for sm_`arch` and reads the result. What does not compile is a fault too."""
    names, constants = case.kernel.arg_names, case.constants_on(arch)
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    try:
        compiled = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # of the compiler's many kinds; the table names it, and the others are still compiled
        return Code(name=case.name, arch=arch, faults=[f"does not compile: {type(error).__name__}: {error}"[:200]])
    code = Code(name=case.name, arch=arch, shared_bytes=compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass, usage = _dump("-sass", cubin.name), _dump("-res-usage", cubin.name)
    ttir, ptx = compiled.asm["ttir"], compiled.asm["ptx"]
    code.registers = int(re.search(r"REG:(\d+)", usage).group(1))
    # On sm_120 the ptxas of triton 3.6 stores a zero, which nobody reads, before TMA loads: that is no spill.
    code.spills = len(re.findall(r"\bLDL\b|\bSTL\b[\w.]* \[[^\]]*\], (?!RZ\b)", sass))
    if code.spills:
        code.faults.append(f"{code.spills} spills")
    if code.shared_bytes > SHARED_LIMIT_BYTES[arch]:
        code.faults.append(f"{code.shared_bytes} bytes of shared memory, the chip has {SHARED_LIMIT_BYTES[arch]}")
    _read_matrix(code, case, ttir, ptx, sass)
    _read_loads(code, ptx, sass)
    _read_reductions(code, case, ttir, ptx, sass)
    code.faults += faults_of_offsets(ttir, flat=case.flat)
    if case.faults_of_ptx:
        code.faults += case.faults_of_ptx(ptx)
    return code


def _dump(what: str, path: str) -> str:
    return subprocess.run([_CUOBJDUMP, what, path], capture_output=True, text=True, check=True).stdout


def _read_matrix(code: Code, case: Case, ttir: str, ptx: str, sass: str) -> None:
    units = {name: len(re.findall(rf"\b{name}\b", sass)) for name in _MATRIX_UNITS}
    code.matrix = ", ".join(f"{count} {name}" for name, count in units.items() if count) or "-"
    wants = case.matrix or re.search(r"tt\.dot .*xb?f16> \*", ttir)
    if wants and code.arch == 90 and not units["HGMMA"]:
        code.faults.append("no HGMMA")
    if wants and not any(units.values()):
        code.faults.append("no matrix instruction")
    if "tf32" in ptx:
        code.faults.append("multiplies in tf32")


def _read_loads(code: Code, ptx: str, sass: str) -> None:
    loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfus](\d+)", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x[0-9a-f]+|\d+)", ptx)
    widths = {int(bits) * int(count or 1) // 8 for count, bits in loads} | {int(size, 0) for size in copies}
    bulk = "UTMALDG" in sass
    kinds = [*(str(width) for width in sorted(widths)), *(["TMA"] if bulk else [])]
    code.loads = "/".join(kinds) or "-"
    if widths & {1, 2} or re.search(r"\bLDG[\w.]*\.[US](?:8|16)\b", sass):
        code.faults.append("scalar 2-byte loads")
    if 16 not in widths and not bulk:
        code.faults.append("no 16-byte loads")


def _read_reductions(code: Code, case: Case, ttir: str, ptx: str, sass: str) -> None:
    if re.search(r"\bCAS\b|\batom\.[\w.]*cas", sass + ptx):
        code.faults.append("compare-and-swap")
    written = set(re.findall(r"\b(?:red|atom|cp\.reduce)\.[\w.:]+", ptx))
    made = set(re.findall(r"\b(?:REDG?|ATOMG?|UTMAREDG)\b[\w.]*", sass))
    made.discard("ATOMG.E.EXCH.STRONG.GPU")  # how a tensor map is acquired: in memory of this GPU
    code.reduction = ", ".join(sorted(made)) or "-"
    if not case.reduces:
        return
    bulk = {name for name in written if re.match(r"cp\.reduce\.async\.bulk\.tensor\.\dd\.global\..*\badd\b", name)}
    single = written - bulk
    # A bulk reduction has no order or scope of its own.
    wrong = {name for name in single if not {"global", "sys", "relaxed", "add"} <= set(name.split("."))}
    for name in made:
        unit, *parts = name.split(".")  # [Note: unused results]
        single_add = unit in ("RED", "REDG") and "ADD" in parts and name.endswith("STRONG.SYS")
        if not single_add and not (unit == "UTMAREDG" and "ADD" in parts):
            wrong.add(name)
    if wrong or not written:
        code.faults.append(f"reduces by {', '.join(sorted(wrong)) or 'nothing'}")
    # Dimensions of what single additions are written for; of a tile two are longer than 1.
    shapes = re.findall(r"tt\.atomic_rmw .*tensor<([\dx]+)x(?:f32|f16|bf16)>", ttir)
    if (
        code.arch in (90, 100)
        and not case.far
        and any(len([d for d in shape.split("x") if d != "1"]) > 1 for shape in shapes)
    ):
        code.faults.append("a tile is reduced by single additions")
