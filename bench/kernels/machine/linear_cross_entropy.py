from __future__ import annotations

from collections.abc import Iterator

from odc_kernels import online_softmax

from .case import Case


def cases() -> Iterator[Case]:
    tile = online_softmax.ONLINE_SOFTMAX
    sizes = {"scale": "fp32", "tokens": "i32", "stride": "i32", "count": "i32", "first": "i32"}
    blocks = {"BLOCK_T": tile.t, "BLOCK_V": tile.v}
    for dtype in ("bf16", "fp16", "fp32"):
        data = {"logits": f"*{dtype}", "targets": "*i64"}
        running = dict.fromkeys(("maximum", "total", "moment", "picked"), "*fp32")
        yield Case(
            name=f"linear_cross_entropy softmax {dtype}",
            kernel=online_softmax.online_softmax_kernel,
            signature={**data, **running, **sizes},
            constants=blocks,
            aligned=("logits", "targets", *running, "stride"),
            num_warps=tile.num_warps,
        )
        given = dict.fromkeys(("lse", "entropy", "g_logp", "g_entropy"), "*fp32")
        yield Case(
            name=f"linear_cross_entropy dz {dtype}",
            kernel=online_softmax.softmax_grad_kernel,
            signature={**data, **given, **sizes, "vocabulary": "i32", "ignore_index": "i32"},
            constants={"HAS_ENTROPY": True, **blocks},
            aligned=("logits", "targets", *given, "stride"),
            num_warps=tile.num_warps,
        )
