"""Where a stretch of time went: spans by what they are for, each moment counted once. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

PRODUCTS = "matrix products"
ATTENTION = "attention"
KERNELS = "our operators"
OTHER = "other compute"
OPTIMIZER = "optimizer"
ACCUMULATE = "accumulate"
GATHER = "gather"
MEETINGS = "meetings"
IDLE = "idle"
CATEGORIES = (PRODUCTS, ATTENTION, KERNELS, OTHER, OPTIMIZER, ACCUMULATE, GATHER, MEETINGS, IDLE)

# On a GPU several streams run at a time: the first of these that does gets the moment, so accumulate and gather are
# what of them is not hidden behind compute.
_ON_STREAMS = (PRODUCTS, ATTENTION, KERNELS, OTHER, OPTIMIZER, ACCUMULATE, GATHER, MEETINGS)


class Span(NamedTuple):
    """Something that ran from `start_s` to `end_s`; `category` is one of CATEGORIES but IDLE."""

    category: str
    start_s: float
    end_s: float


def nested(spans: Sequence[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds of each category between two moments of one thread, whose spans nest: the innermost gets the moment."""
    return _sum_up([(-span.start_s, span.end_s) for span in spans], spans, start_s, end_s)


def overlapping(spans: Sequence[Span], start_s: float, end_s: float) -> dict[str, float]:
    """The same of one GPU, whose streams run side by side: what is nearest to compute gets the moment."""
    return _sum_up([(_ON_STREAMS.index(span.category), 0.0) for span in spans], spans, start_s, end_s)


def _sum_up(
    ranks: Sequence[tuple[float, float]], spans: Sequence[Span], start_s: float, end_s: float
) -> dict[str, float]:
    """Of all spans that run at a moment, the one of lowest rank gets it; IDLE where none runs."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    inside = [
        (max(span.start_s, start_s), min(span.end_s, end_s), rank, span.category)
        for rank, span in zip(ranks, spans, strict=True)
        if span.end_s > start_s and span.start_s < end_s
    ]
    edges = sorted({start_s, end_s, *(part[0] for part in inside), *(part[1] for part in inside)})
    arriving = sorted(inside, key=lambda part: part[0], reverse=True)
    running: list[tuple[tuple[float, float], float, str]] = []
    for left_s, right_s in pairwise(edges):
        while arriving and arriving[-1][0] <= left_s:
            _, until_s, rank, category = arriving.pop()
            heapq.heappush(running, (rank, until_s, category))
        while running and running[0][1] <= left_s:
            heapq.heappop(running)
        seconds[running[0][2] if running else IDLE] += right_s - left_s
    return seconds


_PRODUCT_OPS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "matmul", "linear", "dot")
_PRODUCT_KERNELS = ("gemm", "cutlass", "nvjet", "xmma", "splitk", "gemv")
_ATTENTION_WORDS = ("scaled_dot_product", "flash", "fmha", "varlen_attn", "_efficient_attention")


def category_of_operator(name: str) -> str | None:
    """What an operator of torch, or a named range, is for; None where what stands around it says so."""
    if name == "odc.accumulate":
        return ACCUMULATE
    if name == "odc.gather":
        return GATHER
    if name.startswith("Optimizer.step"):
        return OPTIMIZER
    if name.startswith("odc::"):
        return KERNELS
    short = name.removeprefix("aten::").removeprefix("mkldnn::")
    if name.startswith(("aten::", "mkldnn::")) and short.strip("_") in _PRODUCT_OPS:
        return PRODUCTS
    if any(word in name for word in _ATTENTION_WORDS):
        return ATTENTION
    return None


def category_of_kernel(name: str, ours: frozenset[str]) -> str:
    """What a kernel or a copy on a GPU is for. `ours`: the names of Triton's kernels here."""
    lower = name.lower()
    if name == "scatter_kernel":
        return ACCUMULATE
    if name in ours:
        return KERNELS
    if any(word in lower for word in _ATTENTION_WORDS):
        return ATTENTION
    if any(word in lower for word in _PRODUCT_KERNELS):
        return PRODUCTS
    if "adam" in lower:
        return OPTIMIZER
    if lower.startswith("memcpy"):
        return GATHER
    return OTHER
