"""embedding and embedding_grad, beside torch on a local table. Half of the ids are frequent ones, as in text."""

from __future__ import annotations

import torch

from odc_kernels.embedding import embedding, embedding_grad, embedding_grad_ref, embedding_ref

from .operator import CHUNK, Operator, Prepared, Problem, Results, Work, added

FREQUENT = 64


def some_ids(problem: Problem) -> torch.Tensor:
    """int64 [T], every second one of the first `FREQUENT`, spread over the vocabulary and so over its owners."""
    rows = problem.layer.rows
    ids = torch.randint(rows, (problem.tokens,), device=problem.device)
    ids[::2] = torch.randint(FREQUENT, ids[::2].shape, device=problem.device) * (rows // FREQUENT)
    return ids


def prepare(problem: Problem) -> Prepared:
    whole, ids = problem.weight(), some_ids(problem)
    peers, out = problem.shards(whole), problem.poisoned(problem.tokens, problem.layer.columns)
    row_bytes = problem.layer.columns * whole.element_size()
    remote = int((ids >= problem.own_rows).sum())

    def check() -> Results:
        out.fill_(torch.nan)
        embedding(ids=ids, weight=peers, out=out)
        for now, of in zip(out.split(CHUNK), ids.split(CHUNK), strict=True):
            yield "out", now, embedding_ref(of, [whole])

    return Prepared(
        run=lambda: embedding(ids=ids, weight=peers, out=out),
        check=check,
        baselines={"torch, local": lambda: torch.index_select(whole, 0, ids, out=out)},
        work=Work(
            hbm_bytes=(2 * len(ids) - remote) * row_bytes,
            link_bytes=remote * row_bytes,
            peer_bytes=remote * row_bytes,
        ),
    )


def prepare_grad(problem: Problem) -> Prepared:
    columns, ids = problem.layer.columns, some_ids(problem)
    before = problem.tensor(problem.layer.rows, columns, dtype=torch.float32)
    dy, peers = problem.tensor(problem.tokens, columns), problem.shards(before)
    local = before.clone()
    distinct = ids.unique()
    remote = int((distinct >= problem.own_rows).sum())

    def check() -> Results:
        embedding_grad(dy=dy, ids=ids, weight=peers, scale=0.5)
        want = embedding_grad_ref(dy, ids, [before], 0.5, None)[0]
        for rows, now, _ in added(problem, before, peers):
            yield "shards", now, want[rows]

    return Prepared(
        run=lambda: embedding_grad(dy=dy, ids=ids, weight=peers),
        check=check,
        baselines={"torch, local": lambda: local.index_add_(0, ids, dy.float())},
        work=Work(
            hbm_bytes=dy.numel() * dy.element_size() + (len(distinct) - remote) * columns * 8,
            link_bytes=remote * columns * 4,
            peer_bytes=remote * columns * 8,
        ),
    )


OPERATORS = (
    Operator(name="embedding", kernels=("embedding",), layers=lambda model: model.embedding(), prepare=prepare),
    Operator(
        name="embedding_grad",
        kernels=("embedding",),
        layers=lambda model: model.embedding(),
        prepare=prepare_grad,
        reduces=True,
    ),
)
