"""Machine code without a GPU: cross-compiles every kernel for every architecture and inspects the result.

    python -m bench.kernels.aot [--arch 90 ...] [--kernel gather ...] [--also FOLDER ...] [--out FOLDER]

Prints one table (registers, spills, shared memory, matrix instructions, load width, kind of reduction) and fails on
spills, shared memory over the chip's limit, matrix kernels on sm_90 without HGMMA or with one in flight at a time,
products in tf32, scalar 2-byte loads, compare-and-swap, tiles reduced into near peers on sm_90 and sm_100 by anything
but TMA, other reductions into peers by anything but relaxed system-scope red, 32-bit products in addresses, and weight
loads before their wait.
Results are cached until their kernel's source changes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import triton

from odc_kernels.tiles import ARCHITECTURES
from odc_triton.jobs.reports.report import table

from .code import Case, Code, build

_JUDGES = ("code.py", "addresses.py")
_CASES = "bench.kernels.cases"
COLUMNS = ("kernel", "sm", "triton", "registers", "spills", "shared bytes", "matrix", "loads", "reduction", "faults")
_PROGRESS_S = 10.0


def row_of(code: Code) -> list[object]:
    """A row of the table, in the order of `COLUMNS`."""
    read = (code.registers, code.spills, code.shared_bytes, code.matrix, code.loads, code.reduction)
    return [code.name, code.arch, code.triton, *read, "; ".join(code.faults) or "-"]


@lru_cache(maxsize=1)
def _cases(names: tuple[str, ...]) -> dict[str, Case]:
    """What the `cases()` of these modules yield, by name. Raises ValueError if two have the same name."""
    found: dict[str, Case] = {}
    for module in names:
        for case in import_module(module).cases():
            if case.name in found:
                raise ValueError(f"two cases are called {case.name!r}; rename one of them in {module}")
            found[case.name] = case
    return found


def _build(names: tuple[str, ...], name: str, arch: int) -> Code:
    """Runs in another process. A case can't be sent there, so it is looked up by its name."""
    return build(_cases(names)[name], arch)


def compile_all(names: tuple[str, ...], jobs: list[tuple[str, int]], processes: int) -> Iterator[Code]:
    """The code of each (case's name, architecture) as it is done. Prints progress to stderr."""
    began = said = time.monotonic()
    for done, code in enumerate(_built(names, jobs, processes), 1):
        yield code
        now = time.monotonic()
        if code.faults:
            print(f"{code.name} on sm_{code.arch}: {'; '.join(code.faults)}", file=sys.stderr, flush=True)
        if now - said > _PROGRESS_S or done == len(jobs):
            said = now
            passed = f"triton {triton.__version__}: {done} of {len(jobs)} compiled in {now - began:.0f} s"
            print(passed, file=sys.stderr, flush=True)


def _built(names: tuple[str, ...], jobs: list[tuple[str, int]], processes: int) -> Iterator[Code]:
    if processes == 1:
        yield from (_build(names, name, arch) for name, arch in jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(_build, names, name, arch) for name, arch in jobs]):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def codes_of(names: tuple[str, ...], options: argparse.Namespace) -> list[Code]:
    """The code of all requested cases, by this triton; unchanged ones come from the cache."""
    judges = hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _JUDGES))
    cache = options.out / f"triton-{triton.__version__}.json"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    wanted, patterns = {}, set(options.kernel) - _cases(names).keys()
    for name, case in _cases(names).items():
        if name in options.kernel or any(fnmatchcase(name, f"{pattern}*") for pattern in patterns):
            wanted |= {(name, arch): f"{case.digest(arch)}-{judges.hexdigest()[:16]}" for arch in options.arch}
    jobs = [key for key, digest in wanted.items() if known.get(f"{key[0]} sm_{key[1]}", {}).get("digest") != digest]
    try:
        for code in compile_all(names, jobs, options.processes) if jobs else ():
            known[f"{code.name} sm_{code.arch}"] = {"digest": wanted[code.name, code.arch], "code": asdict(code)}
    finally:  # an interrupted run continues where it stopped
        cache.write_text(json.dumps(known, indent=1))
    return [Code(**known[f"{name} sm_{arch}"]["code"]) for name, arch in wanted]


def _codes_of_other(folder: Path, options: argparse.Namespace) -> list[Code]:
    """The same by the triton in `folder`, which another process imports."""
    found = options.out / "other.json"
    command = [sys.executable, "-m", "bench.kernels.aot", "--results", str(found), "--out", str(options.out)]
    command += ["--arch", *map(str, options.arch), "--processes", str(options.processes), "--cases", *options.cases]
    command += ["--kernel", *options.kernel] if options.kernel != [""] else []
    path = os.pathsep.join(filter(None, [str(folder.resolve()), os.environ.get("PYTHONPATH")]))
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
    return [Code(**code) for code in json.loads(found.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--kernel", nargs="*", default=[""], help="the case of that name, or with that prefix (*bf16)")
    parser.add_argument("--cases", nargs="*", default=[_CASES], help="modules that have the cases")
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="folders of other tritons, to use as well")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many compile at a time")
    parser.add_argument("--out", type=Path, default=Path("out/aot"), help="folder of the cache and of aot.json")
    parser.add_argument("--results", type=Path, help="write the results to this file and print no table")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    for folder in options.also:
        if not (folder / "triton").is_dir():
            parser.error(f"{folder} has no triton in it; run: pip install --no-deps --target {folder} triton==…")
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    codes = codes_of(tuple(options.cases), options)
    if not codes:
        parser.error(f"no case begins with {' or '.join(options.kernel)}")
    for folder in options.also:
        codes += _codes_of_other(folder, options)
    (options.results or options.out / "aot.json").write_text(json.dumps([asdict(code) for code in codes], indent=1))
    if options.results:
        return 0
    print(table([row_of(code) for code in codes], COLUMNS))
    faulty = [code for code in codes if code.faults]
    tritons = " and ".join(dict.fromkeys(code.triton for code in codes))
    kernels = len({code.name for code in codes})
    verdict = f"{len(faulty)} of {len(codes)} are faulty" if faulty else f"all {len(codes)} compile as they should"
    print(f"{kernels} cases, triton {tritons}, {time.monotonic() - began:.0f} s: {verdict}")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
