from __future__ import annotations

from collections.abc import Iterator

from odc_kernels import gather, scatter

from .case import TYPES, Case

_SIZES = {"rows": "i32", "rows_per_owner": "i32", "row_elements": "i32", "rank": "i32", "world": "i32"}


def cases() -> Iterator[Case]:
    for source, target in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")):
        yield Case(
            name=f"gather {source} to {target}",
            kernel=gather.gather_kernel,
            signature={"table": "*i64", "out": f"*{target}", **_SIZES},
            constants={"DTYPE": TYPES[source], "ALIGNED": True, "BLOCK": 4096},
            aligned=("table", "out", "rows_per_owner", "row_elements"),
            flat=True,
        )
    for dtype, even in (("fp32", 4), ("bf16", 8)):
        yield Case(
            name=f"gather_pieces {dtype}",
            kernel=gather.gather_pieces_kernel,
            signature={"sources": "*i64", "offsets": "*i64", "counts": "*i64", "out": f"*{dtype}"},
            constants={"DTYPE": TYPES[dtype], "EVEN": even, "BLOCK": 2048},
            aligned=("sources", "offsets", "counts", "out"),
        )
    for dtype in ("fp32", "bf16", "fp16"):
        yield Case(
            name=f"scatter {dtype}",
            kernel=scatter.scatter_kernel,
            signature={"table": "*i64", "gradient": f"*{dtype}", "scale": "fp32", **_SIZES},
            constants={"ALIGNED": True, "BLOCK": 2048},
            aligned=("table", "gradient", "rows_per_owner", "row_elements"),
            reduces=True,
            flat=True,
        )
