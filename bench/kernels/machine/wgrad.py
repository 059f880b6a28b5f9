from __future__ import annotations

from collections.abc import Iterator

from odc_kernels import tiles, wgrad

from .case import MATRIX_SIZES, Case


def cases() -> Iterator[Case]:
    for dtype in ("bf16", "fp16", "fp32"):
        tile = tiles.WGRAD_FP32 if dtype == "fp32" else tiles.WGRAD
        data = {"dy": f"*{dtype}", "x": f"*{dtype}", "w_table": "*i64", "db": "*fp32", "scale": "fp32"}
        blocks = {"BLOCK_N": tile.n, "BLOCK_K": tile.k, "BLOCK_T": tile.t, "GROUP": tile.group}
        for name, far in ((f"wgrad {dtype}", False), (f"wgrad {dtype} far", True)):
            yield Case(
                name=name,
                kernel=wgrad.wgrad_kernel,
                signature={**data, **MATRIX_SIZES},
                constants={"HAS_BIAS": True, "UPCAST": False, **blocks},
                by_arch={"BULK": lambda arch, far=far: arch >= 90 and not far},
                aligned=("dy", "x", "w_table", "db", "rows", "rows_per_owner", "columns"),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                matrix=dtype != "fp32",
                reduces=True,
                far=far,
            )
