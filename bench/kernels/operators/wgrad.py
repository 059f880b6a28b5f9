"""wgrad, beside the library's product and an accumulation that follows it."""

from __future__ import annotations

import torch

from odc_kernels.scatter import scatter
from odc_kernels.wgrad import wgrad

from .operator import Operator, Prepared, Problem, Results, Run, Work, added


def prepare(problem: Problem) -> Prepared:
    tokens, rows, columns = problem.tokens, problem.layer.rows, problem.layer.columns
    # Gradients smaller than activations, as in training; sums stay far from fp32's ends in a long run.
    dy, x = problem.tensor(tokens, rows, scale=0.1), problem.tensor(tokens, columns)
    before = problem.tensor(rows, columns, dtype=torch.float32)
    peers = problem.shards(before)
    dw = torch.empty(rows, columns, dtype=problem.dtype, device=problem.device)

    def check() -> Results:
        wgrad(dy=dy, x=x, weight=peers, scale=0.5)
        wide = x.double()
        for of, now, held in added(problem, before, peers):
            yield "shards", now, held.double() + 0.5 * (dy[:, of].double().t() @ wide)

    def product() -> torch.Tensor:
        return torch.mm(dy.t(), x, out=dw)

    def product_then_add() -> None:
        for part, shard in zip(product().split([len(s) for s in peers.shards]), peers.shards, strict=True):
            shard.add_(part)

    def product_then_scatter() -> None:
        scatter(gradient=product(), peers=peers)

    baselines: dict[str, Run] = {"torch.mm": product, "torch.mm, scatter": product_then_scatter}
    if problem.peers == "loopback":  # torch adds to no other device's memory
        baselines["torch.mm, add"] = product_then_add
    if problem.device.type == "cuda" and problem.dtype != torch.float32:
        # torch's own fusion, into one local fp32 tensor: no peers.
        local = before.clone()
        baselines["torch.addmm, local"] = lambda: torch.addmm(local, dy.t(), x, out_dtype=torch.float32, out=local)
    return Prepared(
        run=lambda: wgrad(dy=dy, x=x, weight=peers),
        check=check,
        baselines=baselines,
        work=Work(
            flops=2.0 * tokens * rows * columns,
            hbm_bytes=tokens * (rows + columns) * problem.dtype.itemsize + problem.own_rows * columns * 8,
            link_bytes=problem.remote_rows * columns * 4,
            peer_bytes=problem.remote_rows * columns * 8,
        ),
    )


OPERATORS = (
    Operator(
        name="wgrad",
        kernels=("wgrad",),
        layers=lambda model: model.layers(),
        prepare=prepare,
        reduces=True,
    ),
)
