from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from odc_kernels import linear, tiles

from .case import MATRIX_SIZES, TYPES, Case


def _of_tile(operator: str, dtype: str, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    # The table's tiles of these two are the same on all architectures.
    size = TYPES[dtype].primitive_bitwidth // 8
    tile = tiles.tile_of(operator, element_bytes=size, arch=90, tokens=tokens)
    blocks = {"BLOCK_T": tile.t, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "UPCAST": False}
    return blocks, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def cases() -> Iterator[Case]:
    for dtype, tokens in (("bf16", 64), ("bf16", 256), ("fp16", 64), ("fp16", 256), ("fp32", 64)):
        few = "" if tokens > 64 else " T<=64"
        blocks, options = _of_tile("linear", dtype, tokens)
        yield Case(
            name=f"linear {dtype}{few}",
            kernel=linear.linear_kernel,
            signature={"x": f"*{dtype}", "w_table": "*i64", "b_table": "*i64", "y": f"*{dtype}", **MATRIX_SIZES},
            constants={"DTYPE": TYPES[dtype], "HAS_BIAS": True, **blocks},
            aligned=("x", "w_table", "b_table", "y", "rows", "rows_per_owner", "columns"),
            matrix=dtype != "fp32",
            **options,
        )
        blocks, options = _of_tile("linear_dx", dtype, tokens)
        yield Case(
            name=f"linear_dx {dtype}{few}",
            kernel=linear.linear_dx_kernel,
            signature={"dy": f"*{dtype}", "w_table": "*i64", "dx": f"*{dtype}", **MATRIX_SIZES},
            constants={"DTYPE": TYPES[dtype], **blocks},
            aligned=("dy", "w_table", "dx", "rows", "rows_per_owner", "columns"),
            matrix=dtype != "fp32",
            **options,
        )
