"""Head and loss, beside its products alone and beside torch with whole logits."""

from __future__ import annotations

import torch

from odc_kernels.linear_cross_entropy import (
    HeadOutput,
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_grad,
    linear_cross_entropy_grad_ref,
    linear_cross_entropy_ref,
)

from .operator import CHUNK, Operator, Prepared, Problem, Results, Run, Work, added

IGNORED = -100


def some_targets(problem: Problem) -> torch.Tensor:
    """int64 [T], every fifth one ignored."""
    targets = torch.randint(problem.layer.rows, (problem.tokens,), device=problem.device)
    targets[::5] = IGNORED
    return targets


def _chunk(problem: Problem, *, backward: bool) -> int:
    return chunk_rows(
        tokens=problem.tokens,
        vocabulary=problem.layer.rows,
        columns=problem.layer.columns,
        world=problem.world,
        element_bytes=problem.dtype.itemsize,
        backward=backward,
    )


def _logits_bytes(problem: Problem) -> int:
    return problem.tokens * problem.layer.rows * problem.dtype.itemsize


def prepare(problem: Problem) -> Prepared:
    whole, h = problem.weight(), problem.tensor(problem.tokens, problem.layer.columns)
    peers, targets = problem.shards(whole), some_targets(problem)
    chunk = _chunk(problem, backward=False)
    logits = h.new_empty(problem.tokens, chunk)
    size = h.element_size()

    def check() -> Results:
        got = linear_cross_entropy(h=h, weight=peers, targets=targets, eager=False)
        for start in range(0, problem.tokens, CHUNK):
            part = slice(start, start + CHUNK)
            want = linear_cross_entropy_ref(h[part], [whole], targets[part], IGNORED, 1.0)
            for name in ("logp", "lse", "entropy"):
                # The logits were rounded to h's dtype.
                yield name, getattr(got, name)[part].to(h.dtype), getattr(want, name)

    def products() -> None:
        for rows in whole.split(chunk):
            torch.mm(h, rows.t(), out=logits[:, : len(rows)])

    def whole_logits() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(h @ whole.t(), targets, ignore_index=IGNORED, reduction="none")

    return Prepared(
        run=lambda: linear_cross_entropy(h=h, weight=peers, targets=targets, eager=False),
        check=check,
        baselines={"torch.mm chunks": products, "torch, whole logits": whole_logits},
        work=Work(
            flops=2.0 * problem.tokens * whole.numel(),
            hbm_bytes=(h.numel() + problem.own_rows * problem.layer.columns) * size,
            link_bytes=problem.remote_rows * problem.layer.columns * size,
            peer_bytes=problem.remote_rows * problem.layer.columns * size,
        ),
        whole_bytes=_logits_bytes(problem),
    )


def prepare_grad(problem: Problem) -> Prepared:
    whole, h = problem.weight(), problem.tensor(problem.tokens, problem.layer.columns)
    peers, targets = problem.shards(whole), some_targets(problem)
    before = problem.tensor(*whole.shape, scale=0.1, dtype=torch.float32)
    gradient, dh = problem.shards(before), problem.poisoned(*h.shape)
    g_logp, g_entropy = (problem.tensor(problem.tokens, dtype=torch.float32) for _ in range(2))
    output: HeadOutput = linear_cross_entropy(h=h, weight=peers, targets=targets, eager=False)
    chunk = _chunk(problem, backward=True)
    size, columns = h.element_size(), problem.layer.columns
    dw, dh_part = h.new_empty(chunk, columns), torch.empty_like(h)
    # For the products alone: of the size of a softmax's gradient.
    dz = problem.tensor(problem.tokens, chunk, scale=1e-3)

    def run() -> None:
        linear_cross_entropy_grad(
            h=h,
            weight=peers,
            targets=targets,
            output=output,
            g_logp=g_logp,
            g_entropy=g_entropy,
            gradient=gradient,
            dh=dh,
            eager=False,
        )

    def check() -> Results:
        dh.fill_(torch.nan)
        run()
        want = before.double()
        for start in range(0, problem.tokens, CHUNK):
            part = slice(start, start + CHUNK)
            want_dh, want_dw = linear_cross_entropy_grad_ref(
                h[part], [whole], targets[part], g_logp[part], g_entropy[part], IGNORED, 1.0
            )
            want += want_dw[0]
            yield "dh", dh[part], want_dh
        for rows, now, _ in added(problem, before, gradient):
            # Its logits and their gradients were rounded to h's dtype before they were multiplied and summed.
            yield "dw", now.to(h.dtype), want[rows]

    def products() -> None:
        for rows in whole.split(chunk):
            torch.mm(h, rows.t(), out=dz[:, : len(rows)])
            torch.mm(dz[:, : len(rows)], rows, out=dh_part)
            torch.mm(dz[:, : len(rows)].t(), h, out=dw[: len(rows)])

    def fused() -> None:
        leaves = h.detach().requires_grad_(), whole.detach().requires_grad_()
        options = torch.nn.LinearCrossEntropyOptions()
        loss = torch.nn.functional.linear_cross_entropy(*leaves, targets, ignore_index=IGNORED, options=options)
        torch.autograd.grad(loss, leaves)

    baselines: dict[str, Run] = {"torch.mm chunks": products}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch 2.13 has it, 2.11 does not
        baselines["torch fused, with its forward"] = fused

    return Prepared(
        run=run,
        check=check,
        baselines=baselines,
        work=Work(
            flops=6.0 * problem.tokens * whole.numel(),
            hbm_bytes=(2 * h.numel() + problem.own_rows * columns) * size + problem.own_rows * columns * 8,
            link_bytes=problem.remote_rows * columns * (size + 4),
            peer_bytes=problem.remote_rows * columns * (size + 8),
        ),
        whole_bytes=_logits_bytes(problem),
    )


OPERATORS = (
    Operator(
        name="linear_cross_entropy",
        kernels=("linear_cross_entropy", "online_softmax"),
        layers=lambda model: model.head(),
        prepare=prepare,
    ),
    Operator(
        name="linear_cross_entropy_grad",
        kernels=("linear_cross_entropy", "online_softmax"),
        layers=lambda model: model.head(),
        prepare=prepare_grad,
        reduces=True,
    ),
)
