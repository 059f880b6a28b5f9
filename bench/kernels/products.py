"""Operators that multiply by a weight: linear and its gradient, direct and staged; wgrad; qkv and its gradient.

Each is compared with the library's product on a weight that is already local.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .problem import Model, Operator, Prepared, Problem, Results, Run, Work, by_chunks, by_owner, copies, grown  # isort: skip

from odc_kernels.linear import linear, linear_dx, linear_dx_ref, linear_ref
from odc_kernels.linear_staged import linear_dx_staged, linear_staged
from odc_kernels.peers import PeerShards
from odc_kernels.qkv import qkv, qkv_ref
from odc_kernels.qkv_grad import QkvGradients, qkv_grad, qkv_grad_ref
from odc_kernels.qkv_inputs import QkvWeights, Rope
from odc_kernels.scatter import scatter
from odc_kernels.staged import StagedWeight, check, pull
from odc_kernels.wgrad import wgrad


class Pulled:
    """A buffer that every call pulls the weight into again."""

    def __init__(self, peers: PeerShards) -> None:
        self.peers, self.weight = peers, StagedWeight.of(peers)

    def __call__(self) -> StagedWeight:
        if self.weight.on is not None:
            # Otherwise the copies would start before the clock.
            self.weight.stream.wait_stream(self.weight.on.current())
        self.weight = pull(peers=self.peers, staged=self.weight)
        return self.weight


def _linear(*, staged: bool, dx: bool) -> Callable[[Problem], Prepared]:
    """y = x Wᵀ, or dx = dy W: `direct`, which reads the shards, or `staged`: the kernel alone, on rows that
    have arrived.
    """

    def prepare(problem: Problem) -> Prepared:
        tokens, rows, columns = problem.tokens, problem.layer.rows, problem.layer.columns
        whole, a = problem.weight(), problem.tensor(tokens, rows if dx else columns)
        peers, out = problem.shards(whole), problem.poisoned(tokens, columns if dx else rows)
        pulled = Pulled(peers) if staged else None
        kernels = {True: (linear_staged, linear_dx_staged), False: (linear, linear_dx)}
        launch = kernels[staged][dx]

        def run() -> None:
            weight = peers
            if pulled is not None:
                weight = pulled.weight if pulled.weight.epoch else pulled()
            launch(**{"dy" if dx else "x": a}, weight=weight, out=out)

        def run_whole() -> None:
            run()
            if pulled is not None:
                check(pulled.weight)

        reference = (lambda of: linear_dx_ref(of, [whole])) if dx else (lambda of: linear_ref(of, [whole], None))
        return Prepared(
            run=run,
            check=by_chunks("dx" if dx else "y", run_whole, out, a, reference),
            baselines=_product_baselines(a, whole, peers, transposed=not dx),
            # Every weight and token is read once, every result written once.
            work=problem.work(flops=2.0 * tokens * rows * columns, moved=tokens * (rows + columns), reads=True),
        )

    return prepare


def _product_baselines(a: torch.Tensor, whole: torch.Tensor, peers: PeerShards, *, transposed: bool) -> dict[str, Run]:
    """a @ W, or a @ Wᵀ: alone, and after copying all shards here; and these copies alone."""
    buffer = torch.empty_like(whole)
    here, copied = (whole.t(), buffer.t()) if transposed else (whole, buffer)
    out, copy = a.new_empty(len(a), here.shape[1]), copies(buffer, peers)

    def copy_then_mm() -> None:
        copy()
        torch.mm(a, copied, out=out)

    return {"torch.mm": lambda: torch.mm(a, here, out=out), "copy, torch.mm": copy_then_mm, "copy": copy}


def _wgrad(problem: Problem) -> Prepared:
    tokens, rows, columns = problem.tokens, problem.layer.rows, problem.layer.columns
    # Gradients are smaller than activations, as in training; sums stay far from fp32's limits in a long run.
    dy, x = problem.tensor(tokens, rows, scale=0.1), problem.tensor(tokens, columns)
    before = problem.sums()
    peers = problem.shards(before)
    dw = torch.empty(rows, columns, dtype=problem.dtype, device=problem.device)

    def results() -> Results:
        wgrad(dy=dy, x=x, weight=peers, scale=0.5)
        wide = x.double()
        owners = zip(dy.split([len(shard) for shard in peers.shards], dim=1), by_owner(before, peers), strict=True)
        for part, (held, now) in owners:
            yield "shards", now, held.double() + 0.5 * (part.double().t() @ wide)

    def product() -> torch.Tensor:
        return torch.mm(dy.t(), x, out=dw)

    def product_then_add() -> None:
        for part, shard in by_owner(product(), peers):
            shard.add_(part)

    far = replace(peers, near=frozenset())
    baselines: dict[str, Run] = {
        "torch.mm": product,
        "torch.mm, scatter": lambda: scatter(gradient=product(), peers=peers),
        "torch.mm, add": product_then_add,
        "ours, as if far": lambda: wgrad(dy=dy, x=x, weight=far),
    }
    if problem.device.type == "cuda" and problem.dtype != torch.float32:
        # torch's own fusion, into one local fp32 tensor: no peers.
        local = before.clone()
        baselines["torch.addmm, local"] = lambda: torch.addmm(local, dy.t(), x, out_dtype=torch.float32, out=local)
    return Prepared(
        run=lambda: wgrad(dy=dy, x=x, weight=peers),
        check=results,
        baselines=baselines,
        work=problem.work(flops=2.0 * tokens * rows * columns, moved=tokens * (rows + columns), adds=True),
    )


PARTS = "qkv"


class _Attention:
    """What qkv and its gradient share: the three weights, whole and as shards, biases, tables, tokens."""

    def __init__(self, problem: Problem) -> None:
        model, columns = problem.model, problem.layer.columns
        self.heads = (model.heads, model.kv_heads, model.kv_heads)
        self.whole = problem.weight().split([heads * model.head_dim for heads in self.heads])
        biases = [problem.tensor(len(whole)) for whole in self.whole] if model.qkv_bias else []
        given = {f"w{part}": problem.shards(whole) for part, whole in zip(PARTS, self.whole, strict=True)}
        given |= {f"b{part}": problem.shards(bias) for part, bias in zip(PARTS, biases, strict=False)}
        self.weights = QkvWeights(**given)
        # Two packed sequences.
        length, half = -(-problem.tokens // 2), model.head_dim // 2
        frequencies = 1e-4 ** (torch.arange(half, device=problem.device) / half)
        angles = (torch.arange(length, device=problem.device)[:, None] * frequencies).repeat(1, 2)
        positions = torch.arange(problem.tokens, device=problem.device) % length
        self.rope = Rope(cos=angles.cos().to(problem.dtype), sin=angles.sin().to(problem.dtype), positions=positions)
        self.x = problem.tensor(problem.tokens, columns)
        self.reference = [[whole] for whole in self.whole], [[bias] for bias in biases] or None

    @staticmethod
    def work(problem: Problem, *, products: int, adds: bool) -> Work:
        tokens, rows, columns = problem.tokens, problem.layer.rows, problem.layer.columns
        moved = tokens * (rows + products * columns)
        return problem.work(flops=2.0 * products * tokens * rows * columns, moved=moved, reads=True, adds=adds)


def _qkv(problem: Problem) -> Prepared:
    given, head_dim = _Attention(problem), problem.model.head_dim
    out = [problem.poisoned(problem.tokens, heads, head_dim) for heads in given.heads]
    local, product = torch.cat(given.whole), problem.poisoned(problem.tokens, problem.layer.rows)

    def run() -> None:
        qkv(x=given.x, weights=given.weights, rope=given.rope, q=out[0], k=out[1], v=out[2])

    def results() -> Results:
        for each in out:
            each.fill_(torch.nan)
        run()
        wants = qkv_ref(given.x, *given.reference, given.rope, None, head_dim)
        yield from zip(PARTS, out, wants, strict=True)

    def mm() -> None:
        torch.mm(given.x, local.t(), out=product)

    def mm_rope() -> list[torch.Tensor]:
        mm()
        parts, half = product.unflatten(1, (-1, head_dim)).split(given.heads, dim=1), head_dim // 2
        cos, sin = (table[given.rope.positions, None] for table in (given.rope.cos, given.rope.sin))
        turned = [p * cos + torch.cat((-p[..., half:], p[..., :half]), dim=-1) * sin for p in parts[:2]]
        return [*turned, parts[2]]

    work = _Attention.work(problem, products=1, adds=False)
    return Prepared(run=run, check=results, baselines={"torch.mm": mm, "torch.mm, rope": mm_rope}, work=work)


def _qkv_grad(problem: Problem) -> Prepared:
    given = _Attention(problem)
    gradients = [problem.tensor(problem.tokens, heads, problem.model.head_dim, scale=0.1) for heads in given.heads]
    before = {f"w{part}": problem.sums(*w.shape) for part, w in zip(PARTS, given.whole, strict=True)}
    if problem.model.qkv_bias:
        before |= {f"b{part}": problem.sums(len(w)) for part, w in zip(PARTS, given.whole, strict=True)}
    shards: dict[str, PeerShards] = {name: problem.shards(value) for name, value in before.items()}
    dx = problem.poisoned(*given.x.shape)
    out = QkvGradients(dx=dx, **shards)
    local, dy = torch.cat(given.whole), torch.cat([g.flatten(1) for g in gradients], dim=1)
    dx_local, dw_local = torch.empty_like(dx), torch.empty_like(local)

    def run() -> None:
        dq, dk, dv = gradients
        qkv_grad(dq=dq, dk=dk, dv=dv, x=given.x, weights=given.weights, rope=given.rope, out=out)

    def results() -> Results:
        dx.fill_(torch.nan)
        run()
        want = qkv_grad_ref(tuple(gradients), given.x, *given.reference, given.rope, None)
        yield "dx", dx, want["dx"]
        for name, peers in shards.items():
            # The gradients after RoPE were rounded to x's dtype before they were multiplied and summed.
            yield from grown(name, peers, before[name].double() + want[name], problem.dtype)

    def products() -> None:
        torch.mm(dy, local, out=dx_local)
        torch.mm(dy.t(), given.x, out=dw_local)

    work = _Attention.work(problem, products=2, adds=True)
    return Prepared(run=run, check=results, baselines={"torch.mm": products}, work=work)


def of_products() -> list[Operator]:
    layers, staged = Model.layers, ("staged", "linear_staged")
    # With `direct`, each block of tokens reads the whole weight over the link: nobody would use it beyond a few blocks.
    found = [
        Operator(
            name=f"{'linear_dx' if dx else 'linear'} {'staged' if is_staged else 'direct'}",
            kernels=staged if is_staged else ("linear",),
            layers=layers,
            prepare=_linear(staged=is_staged, dx=dx),
            most_tokens=65536 if is_staged else 1024,
        )
        for is_staged in (False, True)
        for dx in (False, True)
    ]
    of_qkv = {"layers": Model.qkv, "most_tokens": 4096}
    return [
        *found,
        Operator(name="wgrad", kernels=("wgrad",), layers=layers, prepare=_wgrad, reduces=True),
        Operator(name="qkv", kernels=("qkv",), prepare=_qkv, **of_qkv),
        Operator(name="qkv_grad", kernels=("qkv_grad",), prepare=_qkv_grad, reduces=True, **of_qkv),
    ]
