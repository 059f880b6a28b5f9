"""Machine code without a GPU: cross-compiles every kernel for every architecture and reads what came out.

    python -m bench.aot [--arch 90 ...] [--kernel gather ...] [--out FOLDER]

Prints one table (registers, spills, shared memory, matrix instructions, load width, kind of reduction) and fails on
spills, shared memory over the chip's limit, matrix kernels without HGMMA on sm_90, scalar 2-byte loads,
compare-and-swap, and reductions into peers by anything but relaxed system-scope red. Results are cached by source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import odc_kernels
from bench.machine import Case, all_cases
from odc_triton.report import table

SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(kw_only=True)
class Code:
    """What the compiler made of a case."""

    name: str
    arch: int
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    matrix: str = "-"
    loads: str = ""
    reduction: str = "-"
    faults: list[str] = field(default_factory=list)


def build(case: Case, arch: int) -> Code:
    """Compiles and reads one case; `faults` says what is wrong with the code."""
    names = case.kernel.arg_names
    constants = case.constants | {name: choose(arch) for name, choose in case.by_arch.items()}
    if unknown := set(names) - set(case.signature) - set(constants):
        raise ValueError(f"{case.name}: no type or value is given for {sorted(unknown)}")
    source = ASTSource(
        fn=case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    code = Code(name=case.name, arch=arch, shared_bytes=compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass = _dump("-sass", cubin.name)
        usage = _dump("-res-usage", cubin.name)
    _read(code, case, compiled.asm["ptx"], sass, usage)
    return code


def _dump(what: str, path: str) -> str:
    return subprocess.run([_CUOBJDUMP, what, path], capture_output=True, text=True, check=True).stdout


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _read(code: Code, case: Case, ptx: str, sass: str, usage: str) -> None:
    code.registers = int(re.search(r"REG:(\d+)", usage).group(1))
    code.spills = _count(r"\b(?:LDL|STL)\b", sass)
    matrix = {name: _count(rf"\b{name}\b", sass) for name in ("HGMMA", "HMMA", "UTCHMMA", "QMMA")}
    code.matrix = ", ".join(f"{count} {name}" for name, count in matrix.items() if count) or "-"
    loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x[0-9a-f]+|\d+)", ptx)
    widths = sorted({int(bits) * int(count or 1) // 8 for count, bits in loads} | {int(size, 0) for size in copies})
    code.loads = "/".join(str(width) for width in widths) + " bytes" if widths else "-"
    reductions = re.findall(r"\b(?:red|atom|cp\.reduce)\.[\w.:]+", ptx)
    units = {word.split(".")[0] for word in re.findall(r"\b(?:RED|REDG|ATOM|ATOMG|UTMAREDG)\b[\w.]*", sass)}
    code.reduction = ", ".join([*sorted(units), *sorted(set(reductions))]) or "-"
    if code.spills:
        code.faults.append(f"{code.spills} spills")
    if code.shared_bytes > SHARED_LIMIT_BYTES[code.arch]:
        code.faults.append(f"{code.shared_bytes} bytes of shared memory, the chip has {SHARED_LIMIT_BYTES[code.arch]}")
    if case.matrix and code.arch == 90 and not matrix["HGMMA"]:
        code.faults.append("no HGMMA")
    if _count(r"\bCAS\b|atom\.[\w.]*cas", sass + ptx):
        code.faults.append("compare-and-swap")
    if case.reduces:
        # A bulk reduction has no order or scope of its own; it is what a 2-D tile must use where the chip has it.
        bulk = {r for r in reductions if r.startswith("cp.reduce.async.bulk.tensor.2d.global") and ".add" in r}
        wrong = {r for r in reductions if not {"sys", "relaxed", "add"} <= set(r.split("."))} - bulk
        if case.matrix and code.arch in (90, 100) and not bulk:
            code.faults.append("a tile reduced by single atomics")
        if wrong or not reductions:
            code.faults.append(f"reduces by {', '.join(sorted(wrong)) or 'nothing'}")
    if 2 in widths:
        code.faults.append("scalar 2-byte loads")
    if 16 not in widths:
        code.faults.append("no 16-byte loads")


def _digest() -> str:
    """Of all kernels' sources, the cases, this file and triton's version."""
    digest = hashlib.sha256(triton.__version__.encode())
    here = Path(__file__).parent
    for path in sorted([*Path(odc_kernels.__path__[0]).glob("*.py"), *here.glob("machine/*.py"), here / "aot.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


COLUMNS = ("kernel", "sm", "registers", "spills", "shared bytes", "matrix", "loads", "reduction", "faults")


def rows_of(codes: list[Code]) -> list[list[object]]:
    return [
        [
            c.name,
            c.arch,
            c.registers,
            c.spills,
            c.shared_bytes,
            c.matrix,
            c.loads,
            c.reduction,
            "; ".join(c.faults) or "-",
        ]
        for c in codes
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", default=sorted(SHARED_LIMIT_BYTES), help="80, 90, 100, 120")
    parser.add_argument("--kernel", nargs="*", default=[], help="only cases whose name begins so")
    parser.add_argument("--out", type=Path, default=Path("out/aot"), help="folder of the cache and aot.json")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    options.out.mkdir(parents=True, exist_ok=True)
    cache = options.out / f"{_digest()}.json"
    known = {(c["name"], c["arch"]): Code(**c) for c in json.loads(cache.read_text())} if cache.exists() else {}
    codes = []
    for case in all_cases():
        if options.kernel and not case.name.startswith(tuple(options.kernel)):
            continue
        for arch in options.arch:
            known[case.name, arch] = known.get((case.name, arch)) or build(case, arch)
            codes.append(known[case.name, arch])
    cache.write_text(json.dumps([asdict(code) for code in known.values()]))
    print(table(rows_of(codes), COLUMNS))
    faulty = [code for code in codes if code.faults]
    print(f"triton {triton.__version__}: {len(codes) - len(faulty)} of {len(codes)} kernels compile as they should")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
