"""One kernel with one set of types and constants, as `bench.kernels.aot` compiles it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
MATRIX_SIZES = {
    "tokens": "i32",
    "rows": "i32",
    "rows_per_owner": "i32",
    "columns": "i32",
    "rank": "i32",
    "world": "i32",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`signature`: types of the arguments, `constants`: values of the constexprs; what neither names is an error.

    `aligned`: arguments known to be multiples of 16. `by_arch`: constants that the launcher chooses by architecture,
    as a function of it (90 for sm_90). `faults_of_ptx`: what is wrong with the PTX of this kernel besides what is
    asked of every kernel, a line each.
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
    far: bool = False  # which are on other GPUs too, so not in bulk: [Note: bulk reductions] in kernels/device.py
    flat: bool = False  # addresses the elements of a tensor by one number
    faults_of_ptx: Callable[[str], list[str]] | None = None

    def constants_on(self, arch: int) -> dict[str, Any]:
        """The values of all constexprs on sm_`arch`. Raises ValueError where an argument has no type or value, or is
        said to be aligned though a launch would not tell the compiler.
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
        """Of what its code depends on: triton, the source of the kernel and of all that it calls, and the case."""
        given = [
            triton.__version__,
            self.kernel.cache_key,
            sorted(self.signature.items()),
            sorted((name, str(value)) for name, value in self.constants_on(arch).items()),
            self.aligned,
            self.num_warps,
            self.num_stages,
            self.matrix,
            self.reduces,
            self.far,
            self.flat,
            inspect.getsource(inspect.getmodule(self.faults_of_ptx)) if self.faults_of_ptx else "",
            arch,
        ]
        return hashlib.sha256(repr(given).encode()).hexdigest()[:16]
