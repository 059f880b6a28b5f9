from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from odc_kernels import linear_staged, tiles

from .case import MATRIX_SIZES, TYPES, Case

_WAIT = {"flags": "*i32", "status": "*i32", "epoch": "i32", "spins": "i32", **MATRIX_SIZES}


def _blocks(operator: str, element_bytes: int) -> dict[str, Any]:
    def tile(arch: int) -> tiles.LinearTile:
        return tiles.tile_of(operator, element_bytes=element_bytes, arch=arch, tokens=4096)

    fields = {"BLOCK_T": "t", "BLOCK_N": "n", "BLOCK_K": "k", "GROUP": "group", "STAGES": "num_stages"}
    return {name: lambda arch, field=field: getattr(tile(arch), field) for name, field in fields.items()}


def cases() -> Iterator[Case]:
    for dtype in ("bf16", "fp16", "fp32"):
        blocks, dx_blocks = (
            _blocks(operator, TYPES[dtype].primitive_bitwidth // 8)
            for operator in ("linear_staged", "linear_dx_staged")
        )
        pointer = f"*{dtype}"
        common = {"DTYPE": TYPES[dtype], "UPCAST": False}
        aligned = ("w", "flags", "status", "rows", "rows_per_owner", "columns")
        # Owners' rows that are no multiple of a tile leave by pointers.
        for name, whole in ((f"staged {dtype}", True), (f"staged {dtype} ragged", False)):
            yield Case(
                name=name,
                kernel=linear_staged.linear_staged_kernel,
                signature={"x": pointer, "w": pointer, "b_table": "*i64", "y": pointer, **_WAIT},
                constants={"HAS_BIAS": True, **common},
                by_arch={
                    "BULK": lambda arch: arch >= 90,
                    "BULK_OUT": lambda arch, whole=whole: whole and arch >= 90,
                    **blocks,
                },
                aligned=("x", "b_table", "y", *aligned),
                num_warps=8,
                matrix=dtype != "fp32",
                faults_of_ptx=faults_of_waits,
            )
        yield Case(
            name=f"staged_dx {dtype}",
            kernel=linear_staged.linear_dx_staged_kernel,
            signature={"dy": pointer, "w": pointer, "dx": pointer, **_WAIT},
            constants=common,
            by_arch={"BULK": lambda arch: arch >= 90, **dx_blocks},
            aligned=("dy", "dx", *aligned),
            num_warps=8,
            matrix=dtype != "fp32",
            faults_of_ptx=faults_of_waits,
        )


def faults_of_waits(ptx: str) -> list[str]:
    """What is wrong with the order of waits and weight loads in the PTX of a kernel that waits for shards.

    On every path through the code: a load comes behind the branch that decides whether to wait; no load is in flight
    when a wait begins (it would be one for the rows behind the wait); and between a wait and a TMA load lies a proxy
    fence. Loads of the activations are held to the same, as PTX does not tell them apart.
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
    """The lines that may run after each line. Labels of inline assembly begin with no `$`, and loop on themselves."""
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
