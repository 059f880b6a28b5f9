"""linear and linear_dx, by the strategy `direct`, beside the library's product on a weight that is here already."""

from __future__ import annotations

import torch

from odc_kernels.linear import linear, linear_dx, linear_dx_ref, linear_ref
from odc_kernels.peers import PeerShards

from .operator import CHUNK, Operator, Prepared, Problem, Results, Run, Work


def product_work(problem: Problem) -> Work:
    """Of y = x Wᵀ, of dx = dy W: every weight and token read once, every result written once."""
    tokens, rows, columns, size = problem.tokens, problem.layer.rows, problem.layer.columns, problem.dtype.itemsize
    remote_bytes = problem.remote_rows * columns * size
    return Work(
        flops=2.0 * tokens * rows * columns,
        hbm_bytes=(tokens * (rows + columns) + problem.own_rows * columns) * size,
        link_bytes=remote_bytes,
        peer_bytes=remote_bytes,
    )


def product_baselines(a: torch.Tensor, whole: torch.Tensor, peers: PeerShards, *, transposed: bool) -> dict[str, Run]:
    """a @ W, or a @ Wᵀ: alone, and after copying every shard here; and these copies alone."""
    buffer = torch.empty_like(whole)
    here, copied = (whole.t(), buffer.t()) if transposed else (whole, buffer)
    out = a.new_empty(len(a), here.shape[1])

    def copies() -> None:
        for rows, shard in zip(buffer.split([len(s) for s in peers.shards]), peers.shards, strict=True):
            rows.copy_(shard, non_blocking=True)

    def copy_then_mm() -> None:
        copies()
        torch.mm(a, copied, out=out)

    return {
        "torch.mm": lambda: torch.mm(a, here, out=out),
        "copy, torch.mm": copy_then_mm,
        "copy": copies,
    }


def prepare_linear(problem: Problem) -> Prepared:
    whole, x = problem.weight(), problem.tensor(problem.tokens, problem.layer.columns)
    peers, out = problem.shards(whole), problem.poisoned(problem.tokens, problem.layer.rows)

    def check() -> Results:
        out.fill_(torch.nan)
        linear(x=x, weight=peers, out=out)
        for now, of in zip(out.split(CHUNK), x.split(CHUNK), strict=True):
            yield "y", now, linear_ref(of, [whole], None)

    return Prepared(
        run=lambda: linear(x=x, weight=peers, out=out),
        check=check,
        baselines=product_baselines(x, whole, peers, transposed=True),
        work=product_work(problem),
    )


def prepare_linear_dx(problem: Problem) -> Prepared:
    whole, dy = problem.weight(), problem.tensor(problem.tokens, problem.layer.rows)
    peers, out = problem.shards(whole), problem.poisoned(problem.tokens, problem.layer.columns)

    def check() -> Results:
        out.fill_(torch.nan)
        linear_dx(dy=dy, weight=peers, out=out)
        for now, of in zip(out.split(CHUNK), dy.split(CHUNK), strict=True):
            yield "dx", now, linear_dx_ref(of, [whole])

    return Prepared(
        run=lambda: linear_dx(dy=dy, weight=peers, out=out),
        check=check,
        baselines=product_baselines(dy, whole, peers, transposed=False),
        work=product_work(problem),
    )


# Each block of tokens reads the whole weight over the link: beyond a few blocks nobody would use it.
OPERATORS = (
    Operator(
        name="linear direct",
        kernels=("linear",),
        layers=lambda model: model.layers(),
        prepare=prepare_linear,
        most_tokens=1024,
    ),
    Operator(
        name="linear_dx direct",
        kernels=("linear",),
        layers=lambda model: model.layers(),
        prepare=prepare_linear_dx,
        most_tokens=1024,
    ),
)
