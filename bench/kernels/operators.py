"""What the kernels' benchmark measures: gather, scatter, embedding, head and loss here, and the products.

gather and scatter have hardly any arithmetic: they are compared with a device copy of the same number of bytes. The
embedding is compared with torch on a local table; head and loss with their products alone and torch with full logits.
"""

from __future__ import annotations

import torch

from .problem import CHUNK, Model, Operator, Prepared, Problem, Results, Run, Work, by_chunks, by_owner, copies, grown  # isort: skip

from odc_kernels.embedding import embedding, embedding_grad, embedding_grad_ref, embedding_ref
from odc_kernels.gather import gather, gather_ref
from odc_kernels.linear_cross_entropy import (
    chunk_rows,
    linear_cross_entropy,
    linear_cross_entropy_grad,
    linear_cross_entropy_grad_ref,
    linear_cross_entropy_ref,
)
from odc_kernels.linear_divergence import DivergenceOutput, HeadInput, linear_divergence, linear_divergence_grad
from odc_kernels.scatter import scatter, scatter_ref
from odc_triton import divergence
from odc_triton.engine.exact import ExactSum

from .mixtures import of_experts
from .products import of_products

FREQUENT = 64
IGNORED = -100


def _device_copy(problem: Problem, total_bytes: int) -> Run:
    """A copy that reads half of `total_bytes` and writes the other half."""
    source = problem.tensor(max(total_bytes // 4, 1), dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _gather(problem: Problem) -> Prepared:
    whole = problem.weight()
    peers, out = problem.shards(whole), problem.poisoned(*whole.shape)

    def check() -> Results:
        out.fill_(torch.nan)
        gather(peers=peers, out=out)
        yield "out", out, gather_ref([whole], whole.dtype)

    baselines = {
        "device copy": _device_copy(problem, 2 * whole.numel() * whole.element_size()),
        "copy of every shard": copies(out, peers),
    }
    work = problem.work(moved=whole.numel(), reads=True)
    return Prepared(run=lambda: gather(peers=peers, out=out), check=check, baselines=baselines, work=work)


def _scatter(problem: Problem) -> Prepared:
    gradient, before = problem.weight(), problem.sums()
    peers = problem.shards(before)

    def check() -> Results:
        scatter(gradient=gradient, peers=peers, scale=0.5)
        yield from grown("shards", peers, scatter_ref([before], gradient, 0.5)[0])

    def additions() -> None:
        for rows, shard in by_owner(gradient, peers):
            shard.add_(rows)

    copy = _device_copy(problem, gradient.numel() * (gradient.element_size() + 8))
    baselines = {"device copy": copy, "add to every shard": additions}
    work = problem.work(moved=gradient.numel(), adds=True)
    return Prepared(run=lambda: scatter(gradient=gradient, peers=peers), check=check, baselines=baselines, work=work)


def _exact_publish(problem: Problem) -> Prepared:
    """An owner's sums of integers, into fp32."""
    exact, elements = ExactSum(problem.device), problem.own_rows * problem.layer.columns
    shard = torch.randint(-(2**50), 2**50, (elements,), device=problem.device)
    into = problem.poisoned(elements).float()

    def check() -> Results:
        yield "sums", exact.value(shard, into), shard.double() * 2.0**-exact.exponent

    run, moved = (lambda: exact.value(shard, into)), 12 * elements
    baselines = {"device copy": _device_copy(problem, moved)}
    return Prepared(run=run, check=check, baselines=baselines, work=Work(hbm_bytes=moved))


def _some_ids(problem: Problem) -> torch.Tensor:
    """int64 [T], every second one among the first `FREQUENT`, as in text; spread over the vocabulary and its owners."""
    rows = problem.layer.rows
    ids = torch.randint(rows, (problem.tokens,), device=problem.device)
    ids[::2] = torch.randint(FREQUENT, ids[::2].shape, device=problem.device) * (rows // FREQUENT)
    return ids


def _embedding(problem: Problem) -> Prepared:
    whole, ids = problem.weight(), _some_ids(problem)
    peers, out = problem.shards(whole), problem.poisoned(problem.tokens, problem.layer.columns)
    remote = int((ids >= problem.own_rows).sum())

    def run() -> None:
        embedding(ids=ids, weight=peers, out=out)

    return Prepared(
        run=run,
        check=by_chunks("out", run, out, ids, lambda of: embedding_ref(of, [whole])),
        baselines={"torch, local": lambda: torch.index_select(whole, 0, ids, out=out)},
        work=problem.work(moved=out.numel(), reads=True, own=len(ids) - remote, remote=remote),
    )


def _embedding_grad(problem: Problem) -> Prepared:
    ids, before = _some_ids(problem), problem.sums()
    dy, peers = problem.tensor(problem.tokens, problem.layer.columns), problem.shards(before)
    local, distinct = before.clone(), ids.unique()
    remote = int((distinct >= problem.own_rows).sum())

    def check() -> Results:
        embedding_grad(dy=dy, ids=ids, weight=peers, scale=0.5)
        yield from grown("shards", peers, embedding_grad_ref(dy, ids, [before], 0.5, None)[0])

    return Prepared(
        run=lambda: embedding_grad(dy=dy, ids=ids, weight=peers),
        check=check,
        baselines={"torch, local": lambda: local.index_add_(0, ids, dy.float())},
        work=problem.work(moved=dy.numel(), adds=True, own=len(distinct) - remote, remote=remote),
    )


class _Head:
    """What the loss and its gradient share. Every fifth target is ignored."""

    def __init__(self, problem: Problem, *, backward: bool) -> None:
        self.whole, self.h = problem.weight(), problem.tensor(problem.tokens, problem.layer.columns)
        self.targets = torch.randint(problem.layer.rows, (problem.tokens,), device=problem.device)
        self.targets[::5] = IGNORED
        self.given = {"h": self.h, "weight": problem.shards(self.whole), "targets": self.targets, "eager": False}
        self.chunk = chunk_rows(
            tokens=problem.tokens,
            vocabulary=problem.layer.rows,
            columns=problem.layer.columns,
            world=problem.world,
            element_bytes=problem.dtype.itemsize,
            backward=backward,
        )
        self.flops = 2.0 * problem.tokens * self.whole.numel()
        self.parts = [slice(start, start + CHUNK) for start in range(0, problem.tokens, CHUNK)]


def _cross_entropy(problem: Problem) -> Prepared:
    head = _Head(problem, backward=False)
    whole, h, targets = head.whole, head.h, head.targets
    logits = h.new_empty(problem.tokens, head.chunk)

    def check() -> Results:
        got = linear_cross_entropy(**head.given)
        for part in head.parts:
            want = linear_cross_entropy_ref(h[part], [whole], targets[part], IGNORED, 1.0)
            for name in ("logp", "lse", "entropy"):
                # The logits were rounded to h's dtype.
                yield name, getattr(got, name)[part].to(h.dtype), getattr(want, name)

    def products() -> None:
        for rows in whole.split(head.chunk):
            torch.mm(h, rows.t(), out=logits[:, : len(rows)])

    def whole_logits() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(h @ whole.t(), targets, ignore_index=IGNORED, reduction="none")

    return Prepared(
        run=lambda: linear_cross_entropy(**head.given),
        check=check,
        baselines={"torch.mm chunks": products, "torch, whole logits": whole_logits},
        work=problem.work(flops=head.flops, moved=h.numel(), reads=True),
    )


def _cross_entropy_grad(problem: Problem) -> Prepared:
    head = _Head(problem, backward=True)
    whole, h, targets = head.whole, head.h, head.targets
    before = problem.sums().mul_(0.1)
    gradient, dh = problem.shards(before), problem.poisoned(*h.shape)
    g_logp, g_entropy = (problem.sums(problem.tokens) for _ in range(2))
    output = linear_cross_entropy(**head.given)
    dw, dh_part = h.new_empty(head.chunk, problem.layer.columns), torch.empty_like(h)
    # For the products alone: as large as a softmax's gradient.
    dz = problem.tensor(problem.tokens, head.chunk, scale=1e-3)
    given = {"output": output, "g_logp": g_logp, "g_entropy": g_entropy, "gradient": gradient, "dh": dh}

    def run() -> None:
        linear_cross_entropy_grad(**head.given, **given)

    def check() -> Results:
        dh.fill_(torch.nan)
        run()
        want = before.double()
        for part in head.parts:
            want_dh, want_dw = linear_cross_entropy_grad_ref(
                h[part], [whole], targets[part], g_logp[part], g_entropy[part], IGNORED, 1.0
            )
            want += want_dw[0]
            yield "dh", dh[part], want_dh
        # Its logits and their gradients were rounded to h's dtype before they were multiplied and summed.
        yield from grown("dw", gradient, want, h.dtype)

    def products() -> None:
        for rows in whole.split(head.chunk):
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
    work = problem.work(flops=3 * head.flops, moved=2 * h.numel(), reads=True, adds=True)
    return Prepared(run=run, check=check, baselines=baselines, work=work)


def _divergence(problem: Problem) -> Prepared:
    """Forward and backward; the teacher's head is of the same size."""
    student, teacher = (_Head(problem, backward=True) for _ in range(2))
    g, dh = problem.sums(problem.tokens), problem.poisoned(*student.h.shape)
    before = problem.sums().mul_(0.1)
    gradient = problem.shards(before)
    given = {
        "student": HeadInput(h=student.h, weight=student.given["weight"]),
        "teacher": HeadInput(h=teacher.h, weight=teacher.given["weight"]),
        "eager": False,
    }

    def run() -> DivergenceOutput:
        output = linear_divergence(**given)
        linear_divergence_grad(**given, output=output, g=g, gradient=gradient, dh=dh)
        return output

    def whole(part: slice, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h, weight = (each.detach().to(dtype).requires_grad_() for each in (student.h[part], student.whole))
        theirs = teacher.h[part].to(dtype) @ teacher.whole.to(dtype).t()
        found = divergence(h @ weight.t(), theirs)
        (found * g[part].to(found.dtype)).sum().backward()
        return found.detach(), h.grad, weight.grad

    def check() -> Results:
        dh.fill_(torch.nan)
        output, want = run(), before.double()
        for part in student.parts:
            apart, want_dh, want_dw = whole(part, torch.float64)
            want += want_dw
            yield "divergence", output.divergence[part].to(dh.dtype), apart
            yield "dh", dh[part], want_dh
        yield from grown("dw", gradient, want, dh.dtype)

    return Prepared(
        run=run,
        check=check,
        baselines={"torch, whole logits": lambda: whole(slice(None), student.h.dtype)},
        work=problem.work(flops=8 * student.flops, moved=3 * student.h.numel(), reads=True, adds=True),
    )


_CROSS_ENTROPY = ("linear_cross_entropy", "online_softmax")
OPERATORS = (
    Operator(name="gather", kernels=("gather",), layers=Model.layers, prepare=_gather, has_tokens=False),
    Operator(
        name="scatter", kernels=("scatter",), layers=Model.layers, prepare=_scatter, has_tokens=False, reduces=True
    ),
    Operator(name="exact publish", kernels=(), layers=Model.embedding, prepare=_exact_publish, has_tokens=False),
    Operator(name="embedding", kernels=("embedding",), layers=Model.embedding, prepare=_embedding),
    Operator(
        name="embedding_grad", kernels=("embedding",), layers=Model.embedding, prepare=_embedding_grad, reduces=True
    ),
    Operator(name="linear_cross_entropy", kernels=_CROSS_ENTROPY, layers=Model.head, prepare=_cross_entropy),
    Operator(
        name="linear_cross_entropy_grad",
        kernels=_CROSS_ENTROPY,
        layers=Model.head,
        prepare=_cross_entropy_grad,
        reduces=True,
    ),
    Operator(
        name="linear_divergence",
        kernels=("linear_divergence", *_CROSS_ENTROPY),
        layers=Model.head,
        prepare=_divergence,
        reduces=True,
    ),
    *of_products(),
    *of_experts(),
)


def all_operators() -> dict[str, Operator]:
    """By name, in the order in which they run: first those that only read peers, as a fault in adding ends a run."""
    return {operator.name: operator for operator in sorted(OPERATORS, key=lambda each: (each.reduces, each.name))}
