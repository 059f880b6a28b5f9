"""The products of 64 experts, 8 for each token, uniformly routed, and torch's grouped product on local weights."""

from __future__ import annotations

from .problem import Layer, Model, Operator, Prepared, Problem, Results, Run, Work, grown  # isort: skip

import torch
import torch.nn.functional as F

from odc_kernels.experts import grouped_linear, grouped_linear_ref
from odc_kernels.experts_wgrad import grouped_wgrad, grouped_wgrad_ref

EXPERTS, TOP = 64, 8


def _layers(model: Model) -> list[Layer]:
    return [Layer(name="expert", rows=model.intermediate // 64 * 8, columns=model.hidden)]


def _routed(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x sorted by expert, offsets and weights."""
    experts = torch.rand(problem.tokens, EXPERTS, device=problem.device).topk(TOP).indices.reshape(-1).sort().values
    bounds = torch.arange(EXPERTS + 1, device=problem.device)
    offsets = torch.searchsorted(experts, bounds).to(torch.int32)
    rows, columns = problem.layer.rows, problem.layer.columns
    weight = problem.tensor(EXPERTS, rows, columns, scale=columns**-0.5)
    return problem.tensor(len(experts), columns), offsets, weight


def _work(problem: Problem, offsets: torch.Tensor, *, adds: bool) -> Work:
    """Of experts that have rows: each is read, or added to, once."""
    rows, columns, size = problem.layer.rows, problem.layer.columns, problem.dtype.itemsize
    pairs, own = problem.tokens * TOP, -(-EXPERTS // problem.world)
    hit = offsets.diff() > 0
    here, there = (int(part.sum()) * rows * columns for part in (hit[:own], hit[own:]))
    each = 8 if adds else size  # a sum is read and written in its owner's memory, and crosses the link once
    return Work(
        flops=2.0 * pairs * rows * columns,
        hbm_bytes=pairs * (rows + columns) * size + here * each,
        link_bytes=there * (4 if adds else size),
        peer_bytes=there * each,
    )


def _baselines(problem: Problem, grouped_mm: Run) -> dict[str, Run]:
    """On a GPU torch's takes bf16 only."""
    on_cpu = problem.device.type == "cpu"
    return {"torch.grouped_mm": grouped_mm} if on_cpu or problem.dtype == torch.bfloat16 else {}


def _forward(problem: Problem) -> Prepared:
    x, offsets, weight = _routed(problem)
    peers, out = problem.shards(weight), problem.poisoned(len(x), problem.layer.rows)

    def run() -> None:
        grouped_linear(x=x, offsets=offsets, weight=peers, out=out)

    def results() -> Results:
        out.fill_(torch.nan)
        run()
        yield "y", out, grouped_linear_ref(x, offsets, [weight])

    baselines = _baselines(problem, lambda: F.grouped_mm(x, weight.mT, offs=offsets[1:]))
    return Prepared(run=run, check=results, baselines=baselines, work=_work(problem, offsets, adds=False))


def _wgrad(problem: Problem) -> Prepared:
    x, offsets, weight = _routed(problem)
    dy, before = problem.tensor(len(x), problem.layer.rows, scale=0.1), problem.sums(*weight.shape)
    peers = problem.shards(before)

    def run() -> None:
        grouped_wgrad(dy=dy, x=x, offsets=offsets, weight=peers)

    def results() -> Results:
        run()
        yield from grown("shards", peers, before.double() + grouped_wgrad_ref(dy, x, offsets)[0])

    baselines = _baselines(problem, lambda: F.grouped_mm(dy.T, x, offs=offsets[1:]))
    return Prepared(run=run, check=results, baselines=baselines, work=_work(problem, offsets, adds=True))


def of_experts() -> list[Operator]:
    return [
        Operator(name="experts", kernels=("experts",), layers=_layers, prepare=_forward),
        Operator(name="experts wgrad", kernels=("experts_wgrad",), layers=_layers, prepare=_wgrad, reduces=True),
    ]
