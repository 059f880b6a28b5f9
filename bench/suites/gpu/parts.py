"""What the GPU reaches, and operators on it: their results against plain torch, and their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.operators import all_operators  # first: it decides where kernels run  # isort: skip

from odc_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_grad
from odc_kernels.peers import PeerShards
from odc_triton.hf.document_attention import AttentionTerms, one_length, varlen
from odc_triton.sequence.attention import AttentionOfTree, Pair, RowsBefore, SeenRows, parts_of
from odc_triton.sequence.flash import FlashAttentionOfTree

from ...device import Gpu
from ...kernels.cells import Cell, plain
from ...kernels.premises import addmm, both_clocks, machine, tree
from ...kernels.problem import MODELS, TINY, Operator, Problem
from ...kernels.run import check, measure, problems
from ...kernels.timing import Machine

# At Llama-3-8B's sizes, the most used first.
TIMED = ("wgrad", "linear staged", "linear_dx staged", "scatter", "gather", "linear_cross_entropy_grad")
TIMED += ("linear_cross_entropy", "exact publish", "qkv", "qkv_grad", "linear_divergence", "embedding_grad")
LAYERS = ("gate, up", "head", "embedding", "qkv")


def rates(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """What other numbers are relative to."""
    yield {"what": "machine", **machine(gpu)}
    if not gpu.rehearsal:
        right = addmm(gpu)
        yield {"what": "addmm in fp32", "passed": right["right"]}
        yield {"what": "versions", "torch": torch.__version__, "gpu": gpu.about()}


def right(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Every operator once, on the odd sizes of a tiny model."""
    for pair in _one_of_each(list(all_operators().values()), TINY, tokens=33, world=2):
        yield _ran(*pair, gpu)


def kernels(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Operators on layers of Llama-3-8B, 4,096 tokens, all eight owners on this GPU."""
    if gpu.rehearsal:
        return
    reached = Machine.measured(gpu, dtype=torch.bfloat16, peers="loopback")
    operators = [all_operators()[name] for name in TIMED]
    for pair in _one_of_each(operators, MODELS["llama-3-8b"], tokens=4096, world=8, layers=LAYERS):
        yield _ran(*pair, gpu, reached)


def _one_of_each(
    operators: Sequence[Operator], model: Any, *, tokens: int, world: int, layers: Sequence[str] = ()
) -> list[tuple[Operator, Problem]]:
    """A problem for each operator, in their order: the first of `layers` that it has."""
    found = problems(operators, [model], (tokens,), (world,), dtype=torch.bfloat16, peers="loopback")
    of = {}
    for operator, problem in found:
        if not layers or problem.layer.name in layers:
            of.setdefault(operator.name, (operator, problem))
    return [of[operator.name] for operator in operators if operator.name in of]


def _ran(operator: Operator, problem: Problem, gpu: Gpu, reached: Machine | None = None) -> dict[str, Any]:
    """Its result against the reference and, where it is known what the machine `reached`, its times."""
    cell = Cell.of(operator, problem)
    prepared = None
    try:
        prepared = operator.prepare(problem)
        check(cell, prepared)
        if reached is not None and cell.passed:
            measure(cell, prepared, reached, gpu, seconds=0.3)
    except Exception as error:  # what a kernel or the compiler raises is its result
        cell.passed, cell.fault = False, f"{type(error).__name__}: {error}"[:600]
    line = {"what": cell.name, "passed": bool(cell.passed), "fault": cell.fault, "errors": plain(cell)["errors"]}
    if reached is not None:
        line |= {"us": {name: each["p50"] for name, each in cell.us.items()}, "missing": cell.missing}
        line |= {"of_roofline": cell.of_roofline, "tflops": cell.tflops, "gb_s": cell.hbm_gb_s}
    del prepared
    gpu.free_cached()
    return line


def head(gpu: Gpu, *, share: float) -> Iterator[dict[str, Any]]:
    """Loss and gradients over a vocabulary: in chunks, and by full logits, of whose memory `share` is allowed."""
    sizes = ((8192, 151936, 1536), (8192, 128256, 4096), (32768, 151936, 1536))
    for tokens, rows, columns in ((64, 256, 32),) if gpu.rehearsal else sizes:
        gpu.forget()
        ways = _heads(gpu, tokens, rows, columns)
        found = {name: _timed(gpu, run) for name, run in ways.items()}
        fused, full = found["fused"], found["full logits"]
        fits = fused is not None and (full is None or gpu.rehearsal or fused["extra_gb"] < share * full["extra_gb"])
        yield {"what": f"{tokens} x {rows} x {columns}", "passed": fits, **found}
        del ways


def _heads(gpu: Gpu, tokens: int, rows: int, columns: int) -> dict[str, Callable[[], Any]]:
    made = {"device": gpu.type, "dtype": torch.float32 if gpu.rehearsal else torch.bfloat16}
    h, w = torch.randn(tokens, columns, **made), torch.randn(rows, columns, **made) * columns**-0.5
    y, g = torch.randint(rows, (tokens,), device=gpu.type), torch.full((tokens,), -1.0 / tokens, device=gpu.type)
    sums, dh = torch.zeros(rows, columns, device=gpu.type), torch.empty_like(h)
    weight = PeerShards.of([w], shape=w.shape, aligned=not gpu.rehearsal)
    into = PeerShards.of([sums], shape=w.shape, aligned=not gpu.rehearsal)
    sink = (lambda _, at, more: sums[at : at + len(more)].add_(more)) if gpu.rehearsal else into

    def fused() -> None:
        out = linear_cross_entropy(h=h, weight=weight, targets=y)
        linear_cross_entropy_grad(h=h, weight=weight, targets=y, output=out, g_logp=g, gradient=sink, dh=dh)

    def full() -> None:
        leaves = h.detach().requires_grad_(), w.detach().requires_grad_()
        torch.autograd.grad(F.cross_entropy((leaves[0] @ leaves[1].t()).float(), y), leaves)

    return {"fused": fused, "full logits": full}


def _timed(gpu: Gpu, run: Callable[[], Any]) -> dict[str, float] | None:
    """None if it has not enough memory."""
    try:
        run()
        marks = [gpu.mark()]
        for _ in range(5):
            run()
            marks.append(gpu.mark())
        gpu.synchronize()
        us = [gpu.us_between(*each) for each in pairwise(marks)]
        return {"ms": statistics.median(us) / 1e3, "extra_gb": gpu.peak_bytes(run) / 1e9}
    except torch.OutOfMemoryError:
        gpu.free_cached()
        return None


class _Given(RowsBefore):
    """Keys and values of other ranks, which are here. Their gradients become `grad`."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.pair = keys, values

    def each(self, *, backward: bool = False) -> Iterator[tuple[int, Pair]]:
        yield 1, self.pair

    def add(self, gradients: Any, needed: Sequence[bool]) -> None:
        for _, found in gradients:
            for leaf, each, need in zip(self.pair, found, needed, strict=True):
                leaf.grad = each.to(leaf.dtype) if need else None


def attention(gpu: Gpu, *, most: float) -> Iterator[dict[str, Any]]:
    """A tree of 8 completions; the last piece of a long sample beside one call over all keys, `most` apart."""
    if not gpu.rehearsal:
        yield {"what": "tree", **tree(gpu)}
    for own, before in ((8, 24),) if gpu.rehearsal else ((8192, 57344), (16384, 16384)):
        ways = _attentions(gpu, own, before)
        pairs = zip(("out", "dq", "dk", "dv"), *(run() for run in ways.values()), strict=True)
        off = {name: float((one.float() - other).norm() / other.norm()) for name, one, other in pairs}
        times = {name: both_clocks(gpu, run) for name, run in ways.items()}
        yield {"what": f"piece of {own} after {before}", "off": off, "passed": max(off.values()) < most, **times}
        del ways


def _attentions(gpu: Gpu, own: int, before: int) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Forward and backward: the result and the gradients of queries, keys, values, [1, heads, tokens, width]."""
    made = {"device": gpu.type, "dtype": torch.float32 if gpu.rehearsal else torch.bfloat16}
    q, seed = (torch.randn(1, own, 32, 128, **made).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, before + own, 8, 128, **made).transpose(1, 2) for _ in range(2))
    parts = parts_of([0, own], [[SeenRows(1, 0, before)]])
    ends = [torch.tensor([0, count], dtype=torch.int32, device=gpu.type) for count in (own, before + own)]
    of_tree = AttentionOfTree if gpu.rehearsal else FlashAttentionOfTree

    def in_parts() -> list[torch.Tensor]:
        mine = [each[:, :, -own:].detach().requires_grad_() for each in (q, k, v)]
        theirs = [each[:, :, :before].detach().requires_grad_() for each in (k, v)]
        out = of_tree.apply(*mine, parts, None, _Given(*theirs))
        out.backward(seed)
        joined = [torch.cat((first.grad, last.grad), 2) for first, last in zip(theirs, mine[1:], strict=True)]
        return [out.detach(), mine[0].grad, *joined]

    def at_once() -> list[torch.Tensor]:
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        if gpu.rehearsal:
            out = one_length(*leaves, AttentionTerms())
        else:
            by_token = [each[0].transpose(0, 1) for each in leaves]
            how = {"ends_of_keys": ends[1], "longest_keys": before + own}
            out = varlen(*by_token, ends[0], own, AttentionTerms(), **how).transpose(0, 1)[None]
        return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

    return {"in_parts": in_parts, "at_once": at_once}
