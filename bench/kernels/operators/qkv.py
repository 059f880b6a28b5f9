"""qkv and its backward, beside the library's products (and RoPE in plain torch) on local weights."""

from __future__ import annotations

import torch

from odc_kernels.peers import PeerShards
from odc_kernels.qkv import QkvWeights, Rope, qkv, qkv_ref
from odc_kernels.qkv_grad import QkvGradients, qkv_grad, qkv_grad_ref

from .operator import Operator, Prepared, Problem, Results, Work, added

PARTS = "qkv"


class Tensors:
    """What forward and backward share: the three weights whole and as shards, biases, tables, tokens."""

    def __init__(self, problem: Problem) -> None:
        model, columns = problem.model, problem.layer.columns
        self.heads = (model.heads, model.kv_heads, model.kv_heads)
        self.whole = problem.weight().split([heads * model.head_dim for heads in self.heads])
        self.biases = [problem.tensor(len(whole)) for whole in self.whole] if model.qkv_bias else None
        given = {f"w{part}": problem.shards(whole) for part, whole in zip(PARTS, self.whole, strict=True)}
        if self.biases is not None:
            given |= {f"b{part}": problem.shards(bias) for part, bias in zip(PARTS, self.biases, strict=True)}
        self.weights = QkvWeights(**given)
        # Two packed sequences.
        length, half = -(-problem.tokens // 2), model.head_dim // 2
        frequencies = 1e-4 ** (torch.arange(half, device=problem.device) / half)
        angles = (torch.arange(length, device=problem.device)[:, None] * frequencies).repeat(1, 2)
        positions = torch.arange(problem.tokens, device=problem.device) % length
        self.rope = Rope(cos=angles.cos().to(problem.dtype), sin=angles.sin().to(problem.dtype), positions=positions)
        self.x = problem.tensor(problem.tokens, columns)

    def reference_biases(self) -> list[list[torch.Tensor]] | None:
        return None if self.biases is None else [[bias] for bias in self.biases]


def _work(problem: Problem, *, products: int, sums: bool) -> Work:
    tokens, rows, columns, size = problem.tokens, problem.layer.rows, problem.layer.columns, problem.dtype.itemsize
    own, remote = problem.own_rows * columns, problem.remote_rows * columns
    return Work(
        flops=2.0 * products * tokens * rows * columns,
        hbm_bytes=tokens * (rows + products * columns) * size + own * (size + 8 * sums),
        link_bytes=remote * (size + 4 * sums),
        peer_bytes=remote * (size + 8 * sums),
    )


def prepare(problem: Problem) -> Prepared:
    given = Tensors(problem)
    out = [problem.poisoned(problem.tokens, heads, problem.model.head_dim) for heads in given.heads]
    local = torch.cat(given.whole)
    product = problem.poisoned(problem.tokens, problem.layer.rows)
    half = problem.model.head_dim // 2

    def run() -> None:
        qkv(x=given.x, weights=given.weights, rope=given.rope, q=out[0], k=out[1], v=out[2])

    def check() -> Results:
        for each in out:
            each.fill_(torch.nan)
        run()
        wants = qkv_ref(
            given.x,
            [[whole] for whole in given.whole],
            given.reference_biases(),
            given.rope,
            None,
            problem.model.head_dim,
        )
        yield from zip(PARTS, out, wants, strict=True)

    def mm() -> None:
        torch.mm(given.x, local.t(), out=product)

    def mm_rope() -> list[torch.Tensor]:
        mm()
        parts = product.unflatten(1, (-1, problem.model.head_dim)).split(given.heads, dim=1)
        cos, sin = (table[given.rope.positions, None] for table in (given.rope.cos, given.rope.sin))
        turned = [p * cos + torch.cat((-p[..., half:], p[..., :half]), dim=-1) * sin for p in parts[:2]]
        return [*turned, parts[2]]

    return Prepared(
        run=run,
        check=check,
        baselines={"torch.mm": mm, "torch.mm, rope": mm_rope},
        work=_work(problem, products=1, sums=False),
    )


def prepare_grad(problem: Problem) -> Prepared:
    given = Tensors(problem)
    gradients = [problem.tensor(problem.tokens, heads, problem.model.head_dim, scale=0.1) for heads in given.heads]
    before = {
        f"w{part}": problem.tensor(*w.shape, dtype=torch.float32) for part, w in zip(PARTS, given.whole, strict=True)
    }
    if given.biases is not None:
        before |= {
            f"b{part}": problem.tensor(len(w), dtype=torch.float32) for part, w in zip(PARTS, given.whole, strict=True)
        }
    shards: dict[str, PeerShards] = {name: problem.shards(value) for name, value in before.items()}
    dx = problem.poisoned(*given.x.shape)
    out = QkvGradients(dx=dx, **shards)
    local, dy = torch.cat(given.whole), torch.cat([g.flatten(1) for g in gradients], dim=1)
    dx_local, dw_local = torch.empty_like(dx), torch.empty_like(local)

    def run() -> None:
        qkv_grad(
            dq=gradients[0],
            dk=gradients[1],
            dv=gradients[2],
            x=given.x,
            weights=given.weights,
            rope=given.rope,
            out=out,
        )

    def check() -> Results:
        dx.fill_(torch.nan)
        run()
        want = qkv_grad_ref(
            tuple(gradients), given.x, [[w] for w in given.whole], given.reference_biases(), given.rope, None
        )
        yield "dx", dx, want["dx"]
        for name, peers in shards.items():
            for rows, now, held in added(problem, before[name], peers):
                # The gradients behind RoPE were rounded to x's dtype before they were multiplied and summed.
                yield name, now.to(problem.dtype), held.double() + want[name][rows]

    def products() -> None:
        torch.mm(dy, local, out=dx_local)
        torch.mm(dy.t(), given.x, out=dw_local)

    return Prepared(
        run=run,
        check=check,
        baselines={"torch.mm": products},
        work=_work(problem, products=2, sums=True),
    )


OPERATORS = (
    # Each block of tokens reads the weights again; over a link it is for few tokens.
    Operator(name="qkv", kernels=("qkv",), layers=lambda model: model.qkv(), prepare=prepare, most_tokens=4096),
    Operator(
        name="qkv_grad",
        kernels=("qkv_grad",),
        layers=lambda model: model.qkv(),
        prepare=prepare_grad,
        most_tokens=4096,
        reduces=True,
    ),
)
