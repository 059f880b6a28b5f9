"""One kernel with one set of types and constants, its compiled code, and the faults in that code.

[Note: unused results] Nothing uses the result of an addition. Triton 3.9 emits it as a `red`, which returns nothing
over the link; earlier versions emit an `atom`, which ptxas turns into a reduction (RED on sm_80, REDG above). But ptxas
keeps the atomic (ATOMG into RZ) in a kernel that acquires a tensor map, as every kernel with a tensor descriptor does:
there the addition might be one end of a synchronisation. So a kernel that reduces in bulk adds nothing else: wgrad
leaves the bias to `scatter`.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from odc_kernels.tiles import SHARED_LIMIT_BYTES

from .addresses import faults_of_offsets

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_NOT_TOLD = ("name", "kernel", "by_arch")  # not in a case's digest, but its kernel's source and its constants are
_MATRIX_UNITS = ("HGMMA", "HMMA", "UTCHMMA", "QMMA")
# A product of a warp group, and before any other a wait until none is in flight.
_SERIAL = re.compile(r"\bHGMMA\b[^\n]*\bgsb0\b(?:(?!\bHGMMA\b|DEPBAR\.LE gsb0)[\s\S])*DEPBAR\.LE gsb0, 0x0")


@dataclass(frozen=True, kw_only=True)
class Case:
    """`signature`: types of the arguments, `constants`: values of the constexprs; one that neither names is an error.

    `aligned`: arguments known to be multiples of 16. `by_arch`: constants that the launcher chooses by architecture,
    as a function of it (90 for sm_90).
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    by_arch: dict[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    matrix: bool = False  # must use the matrix units
    reduces: bool = False  # adds into peers
    far: bool = False  # some of them on other GPUs, so not in bulk: [Note: bulk reductions] in kernels/device.py
    flat: bool = False  # addresses the elements of a tensor by one number
    flags: str = ""  # the PTX instruction that sets or reads peers' flags; such a kernel moves no data
    waits: bool = False  # for shards to arrive: the order of waits and loads in its PTX is checked

    def constants_on(self, arch: int) -> dict[str, Any]:
        """The values of all constexprs on sm_`arch`. Raises ValueError if an argument has no type or value, or is
        marked as aligned although a launch would not tell the compiler.
        """
        constants = self.constants | {name: choose(arch) for name, choose in self.by_arch.items()}
        if unknown := set(self.kernel.arg_names) - set(self.signature) - set(constants):
            raise ValueError(f"{self.name}: no type or value is given for {sorted(unknown)}")
        if untold := [
            p.name for p in getattr(self.kernel, "params", ()) if p.do_not_specialize and p.name in self.aligned
        ]:
            raise ValueError(f"{self.name}: {untold} are aligned here and in do_not_specialize")
        return constants

    def digest(self, arch: int) -> str:
        """Covers what its code depends on: triton, the source of the kernel and of all that it calls, and the case."""
        of_case = vars(self) | {"constants": {name: str(value) for name, value in self.constants_on(arch).items()}}
        told = [sorted(v.items()) if isinstance(v, dict) else v for k, v in of_case.items() if k not in _NOT_TOLD]
        given = [triton.__version__, self.kernel.cache_key, *told, arch]
        return hashlib.sha256(repr(given).encode()).hexdigest()[:16]


@dataclass(kw_only=True)
class Code:
    """`loads`: widths in bytes, and TMA. `reduction`: instructions that add to memory. `seconds`: CPU time."""

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
    """Compiles a case for sm_`arch` and inspects the result. A case that does not compile is a fault too."""
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
    except Exception as error:  # compilers raise many kinds; the table names it, and the others are still compiled
        return Code(name=case.name, arch=arch, faults=[f"does not compile: {type(error).__name__}: {error}"[:200]])
    code = Code(name=case.name, arch=arch, shared_bytes=compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass, usage = _dump("-sass", cubin.name), _dump("-res-usage", cubin.name)
    ttir, ptx = compiled.asm["ttir"], compiled.asm["ptx"]
    code.registers = int(re.search(r"REG:(\d+)", usage).group(1))
    # On sm_120 the ptxas of triton 3.6 stores a zero, which nothing reads, before TMA loads: that is not a spill.
    code.spills = len(re.findall(r"\bLDL\b|\bSTL\b[\w.]* \[[^\]]*\], (?!RZ\b)", sass))
    if code.spills:
        code.faults.append(f"{code.spills} spills")
    if code.shared_bytes > SHARED_LIMIT_BYTES[arch]:
        code.faults.append(f"{code.shared_bytes} bytes of shared memory, the chip has {SHARED_LIMIT_BYTES[arch]}")
    _read_matrix(code, case, ttir, ptx, sass)
    if case.flags:
        _read_flags(code, case, ptx)
    else:
        _read_loads(code, ptx, sass)
    _read_reductions(code, case, ttir, ptx, sass)
    code.faults += faults_of_offsets(ttir, flat=case.flat)
    if case.waits:
        code.faults += faults_of_waits(ptx)
    return code


def _dump(what: str, path: str) -> str:
    return subprocess.run([_CUOBJDUMP, what, path], capture_output=True, text=True, check=True).stdout


def _read_matrix(code: Code, case: Case, ttir: str, ptx: str, sass: str) -> None:
    units = {name: len(re.findall(rf"\b{name}\b", sass)) for name in _MATRIX_UNITS}
    code.matrix = ", ".join(f"{count} {name}" for name, count in units.items() if count) or "-"
    wants = case.matrix or re.search(r"tt\.dot .*xb?f16> \*", ttir)
    if wants and code.arch == 90 and not units["HGMMA"]:
        code.faults.append("no HGMMA")
    if units["HGMMA"] and len(_SERIAL.findall(sass)) == units["HGMMA"]:
        code.faults.append("every HGMMA waits for itself")
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


def _read_flags(code: Code, case: Case, ptx: str) -> None:
    if not re.search(rf"\b{re.escape(case.flags)}\b", ptx):
        code.faults.append(f"no {case.flags}")
    if case.flags.startswith("ld.") and (written := re.findall(r"\b(?:atom|red)\.[\w.]+", ptx)):
        # Over PCIe an atomic that adds nothing may undo what the host writes meanwhile.
        code.faults.append(f"waits by {', '.join(sorted(set(written)))}")


def _read_reductions(code: Code, case: Case, ttir: str, ptx: str, sass: str) -> None:
    if re.search(r"\bCAS\b|\batom\.[\w.]*cas", sass + ptx):
        code.faults.append("compare-and-swap")
    written = set(re.findall(r"\b(?:red|atom|cp\.reduce)\.[\w.:]+", ptx))
    made = set(re.findall(r"\b(?:REDG?|ATOMG?|UTMAREDG)\b[\w.]*", sass))
    # The largest of what is added exactly: in this GPU's memory.
    written = {name for name in written if not {"max", "gpu"} <= set(name.split("."))}
    made = {name for name in made if not ("MAX" in name.split(".") and name.endswith("STRONG.GPU"))}
    made.discard("ATOMG.E.EXCH.STRONG.GPU")  # acquires a tensor map, in this GPU's memory
    code.reduction = ", ".join(sorted(made)) or "-"
    if not case.reduces:
        return
    bulk = {name for name in written if re.match(r"cp\.reduce\.async\.bulk\.tensor\.\dd\.global\..*\badd\b", name)}
    single = written - bulk
    # A bulk reduction has no memory order or scope.
    wrong = {name for name in single if not {"global", "sys", "relaxed", "add"} <= set(name.split("."))}
    for name in made:
        unit, *parts = name.split(".")  # [Note: unused results]
        single_add = unit in ("RED", "REDG") and "ADD" in parts and name.endswith("STRONG.SYS")
        if not single_add and not (unit == "UTMAREDG" and "ADD" in parts):
            wrong.add(name)
    if wrong or not written:
        code.faults.append(f"reduces by {', '.join(sorted(wrong)) or 'nothing'}")
    # Shapes that single additions are written for; a tile has two dimensions longer than 1.
    shapes = re.findall(r"tt\.atomic_rmw .*tensor<([\dx]+)x(?:f32|f16|bf16|i64)>", ttir)
    if (
        code.arch in (90, 100)
        and not case.far
        and any(len([d for d in shape.split("x") if d != "1"]) > 1 for shape in shapes)
    ):
        code.faults.append("a tile is reduced by single additions")


def faults_of_waits(ptx: str) -> list[str]:
    """What is wrong with the order of waits and weight loads in the PTX of a kernel that waits for shards.

    On every path through the code: a load comes after the branch that decides whether to wait; no load is in flight
    when a wait begins (it would be one for the rows after the wait); and there is a proxy fence between a wait and a
    TMA load. Loads of the activations must follow the same rules, because PTX does not tell them apart.
    """
    code = [line.strip() for line in ptx.splitlines()]
    waits = _lines(code, r"\bld\.(?=[\w.]*\bacquire\b)(?=[\w.]*\bsys\b)[\w.]+")
    bulk = _lines(code, r"\bcp\.async\.bulk\.tensor\.\dd\.shared")
    copies = _lines(code, r"\bcp\.async\.c[ag]\.shared\.global\b")
    loads = bulk | copies | _lines(code, r"\bld\.global\.v4\b")
    if not waits or not loads:
        return [f"{len(waits)} waits and {len(loads)} loads of weights"]
    follows = _successors(code)
    start = {0}
    deciding = [line for line in _lines(code, r"^@\S+ bra\b") if not waits & _reached(follows, start, stop={line})]
    nearest = [
        line
        for line in deciding
        if all(line not in _reached(follows, start, stop={other}) for other in deciding if other != line)
    ]
    faults = []
    if loads & _reached(follows, start, stop=set(nearest) or waits):
        faults.append("a weight load before the wait")
    for kind, drain in ((bulk, r"\bmbarrier\.inval\b"), (copies, r"\bcp\.async\.wait_group\s+0;")):
        if waits & _reached(follows, kind, stop=_lines(code, drain)):
            faults.append("a weight load in flight over a wait")
    if bulk & _reached(follows, waits, stop=_lines(code, r"\bfence\.proxy\.async;")):
        faults.append("no proxy fence between a wait and a TMA load")
    return faults


def _lines(code: list[str], pattern: str) -> set[int]:
    return {index for index, line in enumerate(code) if re.search(pattern, line)}


def _successors(code: list[str]) -> list[list[int]]:
    """The lines that may run after each line. Labels in inline assembly have no leading `$`, and loop on themselves."""
    labels = {line.split(":")[0]: index for index, line in enumerate(code) if re.match(r"\$\w+:", line)}
    follows = []
    for index, line in enumerate(code):
        branch = re.match(r"(@\S+\s+)?bra(?:\.uni)?\s+(\$\w+);", line)
        onward = [index + 1] if index + 1 < len(code) else []
        if line.startswith("ret;"):
            onward = []
        elif branch:
            onward = [labels[branch.group(2)], *(onward if branch.group(1) else [])]
        follows.append(onward)
    return follows


def _reached(follows: list[list[int]], start: set[int], *, stop: set[int]) -> set[int]:
    """Lines that can run after those of `start` without passing one of `stop`."""
    reached, open_lines = set(), [line for first in start for line in follows[first]]
    while open_lines:
        line = open_lines.pop()
        if line in reached or line in stop:
            continue
        reached.add(line)
        open_lines += follows[line]
    return reached
