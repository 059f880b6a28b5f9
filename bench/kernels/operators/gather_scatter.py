"""gather and scatter: no arithmetic to speak of, so a device copy of as many bytes is what they are measured by."""

from __future__ import annotations

import torch

from odc_kernels.gather import gather, gather_ref
from odc_kernels.scatter import scatter, scatter_ref

from .operator import Operator, Prepared, Problem, Results, Run, Work, added


def device_copy(problem: Problem, total_bytes: int) -> Run:
    """A copy that reads half of `total_bytes` and writes the other half."""
    source = problem.tensor(max(total_bytes // 4, 1), dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def prepare_gather(problem: Problem) -> Prepared:
    whole = problem.weight()
    peers, out = problem.shards(whole), problem.poisoned(*whole.shape)
    row_bytes = problem.layer.columns * whole.element_size()

    def check() -> Results:
        out.fill_(torch.nan)
        gather(peers=peers, out=out)
        yield "out", out, gather_ref([whole], whole.dtype)

    def copies() -> None:
        for rows, shard in zip(out.split([len(s) for s in peers.shards]), peers.shards, strict=True):
            rows.copy_(shard, non_blocking=True)

    return Prepared(
        run=lambda: gather(peers=peers, out=out),
        check=check,
        baselines={
            "device copy": device_copy(problem, 2 * whole.numel() * whole.element_size()),
            "copy of every shard": copies,
        },
        work=Work(
            hbm_bytes=(problem.own_rows + problem.layer.rows) * row_bytes,
            link_bytes=problem.remote_rows * row_bytes,
            peer_bytes=problem.remote_rows * row_bytes,
        ),
    )


def prepare_scatter(problem: Problem) -> Prepared:
    gradient = problem.weight()
    before = problem.tensor(*gradient.shape, dtype=torch.float32)
    peers = problem.shards(before)
    columns = problem.layer.columns

    def check() -> Results:
        scatter(gradient=gradient, peers=peers, scale=0.5)
        for rows, now, held in added(problem, before, peers):
            yield "shards", now, scatter_ref([held], gradient[rows], 0.5)[0]

    def additions() -> None:
        for rows, shard in zip(gradient.split([len(s) for s in peers.shards]), peers.shards, strict=True):
            shard.add_(rows)

    total_bytes = gradient.numel() * (gradient.element_size() + 8)
    baselines = {"device copy": device_copy(problem, total_bytes)}
    if problem.peers == "loopback":  # torch adds to no other device's memory
        baselines["add to every shard"] = additions
    return Prepared(
        run=lambda: scatter(gradient=gradient, peers=peers),
        check=check,
        baselines=baselines,
        work=Work(
            hbm_bytes=gradient.numel() * gradient.element_size() + problem.own_rows * columns * 8,
            link_bytes=problem.remote_rows * columns * 4,
            peer_bytes=problem.remote_rows * columns * 8,
        ),
    )


OPERATORS = (
    Operator(
        name="gather",
        kernels=("gather",),
        layers=lambda model: model.layers(),
        prepare=prepare_gather,
        has_tokens=False,
    ),
    Operator(
        name="scatter",
        kernels=("scatter",),
        layers=lambda model: model.layers(),
        prepare=prepare_scatter,
        has_tokens=False,
        reduces=True,
    ),
)
