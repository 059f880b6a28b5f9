"""One kernel with one set of types and constants, as `bench.aot` compiles it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
