from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from odc_kernels import linear, tiles

from .case import MATRIX_SIZES, TYPES, Case


def _of_tile(tile: tiles.LinearTile) -> tuple[dict[str, Any], dict[str, Any]]:
    blocks = {"BLOCK_T": tile.t, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "UPCAST": False}
    return blocks, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def cases() -> Iterator[Case]:
    blocks, options = _of_tile(tiles.LINEAR)
    dx_blocks, dx_options = _of_tile(tiles.LINEAR_DX)
    for dtype in ("bf16", "fp16", "fp32"):
        yield Case(
            name=f"linear {dtype}",
            kernel=linear.linear_kernel,
            signature={"x": f"*{dtype}", "w_table": "*i64", "b_table": "*i64", "y": f"*{dtype}", **MATRIX_SIZES},
            constants={"DTYPE": TYPES[dtype], "HAS_BIAS": True, **blocks},
            aligned=("x", "w_table", "b_table", "y", "rows", "rows_per_owner", "columns"),
            matrix=dtype != "fp32",
            **options,
        )
        yield Case(
            name=f"linear_dx {dtype}",
            kernel=linear.linear_dx_kernel,
            signature={"dy": f"*{dtype}", "w_table": "*i64", "dx": f"*{dtype}", **MATRIX_SIZES},
            constants={"DTYPE": TYPES[dtype], **dx_blocks},
            aligned=("dy", "w_table", "dx", "rows", "rows_per_owner", "columns"),
            matrix=dtype != "fp32",
            **dx_options,
        )
