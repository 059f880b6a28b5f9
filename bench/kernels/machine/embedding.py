from __future__ import annotations

from collections.abc import Iterator

from odc_kernels import embedding

from .case import TYPES, Case

_SIZES = {"rows": "i32", "rows_per_owner": "i32", "columns": "i32"}
_GRAD_SIZES = {"scale": "fp32", "tokens": "i32", **_SIZES, "padding": "i32"}
_RUNS = {"ids": "*i64", "begins": "*i64", "ends": "*i64", "table": "*i64", "partial": "*fp32"}


def cases() -> Iterator[Case]:
    tile, grad_tile = embedding.EMBEDDING, embedding.EMBEDDING_GRAD
    blocks = {"SEGMENT": grad_tile.segment, "BLOCK_T": grad_tile.t, "BLOCK_K": grad_tile.k}
    for dtype in ("bf16", "fp16", "fp32"):
        yield Case(
            name=f"embedding {dtype}",
            kernel=embedding.embedding_kernel,
            signature={"ids": "*i64", "table": "*i64", "out": f"*{dtype}", **_SIZES},
            constants={"DTYPE": TYPES[dtype], "BLOCK_K": tile.k},
            aligned=("ids", "table", "out", "columns"),
            num_warps=tile.num_warps,
        )
        yield Case(
            name=f"embedding_grad {dtype}",
            kernel=embedding.embedding_grad_kernel,
            signature={"dy": f"*{dtype}", "order": "*i64", "shift": "i32", **_RUNS, **_GRAD_SIZES},
            constants=blocks,
            aligned=("dy", "order", *_RUNS, "columns"),
            num_warps=grad_tile.num_warps,
            reduces=True,
        )
    yield Case(
        name="embedding_grad_long",
        kernel=embedding.embedding_grad_long_kernel,
        signature={**_RUNS, **_GRAD_SIZES},
        constants=blocks,
        aligned=(*_RUNS, "columns"),
        num_warps=grad_tile.num_warps,
        reduces=True,
    )
