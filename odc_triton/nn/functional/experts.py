"""Products of rows with the matrices of their experts, which are on their owners.

See [Note: two ways in] in linear.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from odc_kernels.peers import PeerShards

from ..choice import AUTO, Choice
from ..operand import ShardedOperand, in_turn, resolve, rows_in_turn
from .linear import by_kernel
from .whole import chosen, handle, read_whole, whole_weight

Bounds = Sequence[int]


def grouped_linear(
    x: torch.Tensor,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    gate: Sequence[float] = (),
    choice: str = AUTO,
) -> torch.Tensor:
    """x_e W_eᵀ + b_e for the rows x_e of each expert e, whose parameters may be sharded.

    | | shape | dtype |
    | --- | --- | --- |
    | x | [S, K], sorted by expert | the weight's, else it is cast |
    | offsets | [E + 1]: expert e's are the rows from offsets[e] to offsets[e + 1] | int32 |
    | weight | [E, N, K], `transposed` [E, K, N] | any floating point for "eager"; fp32, bf16, fp16 for "triton" |
    | bias | [E, N] or None | the weight's |
    | result | [S, N], with a gate [S, N / 2] | the weight's |

    forward: y_e = x_e W_eᵀ + b_e, then the gate. dgrad: dx_e = dy_e W_e. wgrad: dW_e = dy_eᵀ x_e and db_e = the sum of
    dy_e, added to the owners of those experts that have rows. Saved: x, if the weight trains, what went into the gate,
    and the handles; weights are read again. A second derivative uses plain torch on the whole weight. Autocast does
    not apply, as to torch's own grouped product.

    gate: as of `gated`. choice: see docs/layers.md. Raises ValueError for one that is unknown or can't run here,
    IndexError for rows without an expert; kernels can't check without a synchronisation.
    """
    x = x.to(weight.dtype)
    if any(getattr(each, "_odc_handle", None) is None for each in (weight, bias) if each is not None):
        whole, bias = whole_weight(weight), None if bias is None else whole_weight(bias)
        y = grouped_product(x, offsets, whole if transposed else whole.mT, bias)
        return gated(y, gate) if gate else y
    call = torch.ops.odc.grouped_linear if torch.compiler.is_compiling() else _GroupedFunction.apply
    y, _ = call(x, offsets, weight, bias, handle(weight), handle(bias), transposed, list(gate), choice)
    return y


def grouped_product(
    x: torch.Tensor, offsets: torch.Tensor, matrices: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x_e M_e + b_e in plain torch; matrices: [E, K, N]."""
    aligned = all(size * x.element_size() % 16 == 0 for size in matrices.shape[1:])
    if x.dtype != torch.float64 and aligned and bias is None and len(x):
        rows_or_columns = 1 in matrices.stride()[1:]  # as it requires; PEFT's second factor has experts last
        return F.grouped_mm(x, matrices if rows_or_columns else matrices.contiguous(), offs=offsets[1:])
    bounds = offsets.tolist()
    biases = [None] * len(matrices) if bias is None else bias.unbind()
    rows = x.split(_counts(bounds))
    with torch.autocast(x.device.type, enabled=False):
        return torch.cat([F.linear(*each) for each in zip(rows, matrices.mT.unbind(), biases, strict=True)])


def _counts(bounds: Bounds) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def _forward(
    x: torch.Tensor,
    offsets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_handle: torch.Tensor,
    bias_handle: torch.Tensor | None,
    transposed: bool,
    gate: Sequence[float],
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Also returns what went into the gate."""
    w, b = resolve(weight_handle), None if bias_handle is None else resolve(bias_handle)
    how = _chosen(w, x, choice)
    y = x.new_empty(len(x), w.shape[1 + transposed])
    if not by_kernel(how, x, w):
        bounds = offsets.tolist()
        if bounds[0] or bounds[-1] != len(x):
            wrong = len(x) - bounds[-1] + bounds[0]
            raise IndexError(f"the router chose an expert outside of 0..{len(bounds) - 2}, {wrong} times")
        hit = _hit(bounds)
        for expert, matrix in rows_in_turn(w, hit, how.source):
            rows = slice(bounds[expert], bounds[expert + 1])
            torch.mm(x[rows], matrix if transposed else matrix.T, out=y[rows])
        for expert, row in () if b is None else rows_in_turn(b, hit, "direct"):
            y[bounds[expert] : bounds[expert + 1]] += row
        return (gated(y, gate), y) if gate else (y, y.new_empty(0))
    from odc_kernels.experts import Gate
    from odc_kernels.experts import grouped_linear as by_tiles

    act, more = y, {}
    if gate:
        limit, alpha, interleaved = gate
        act = y.new_empty(len(y), y.shape[1] // 2)
        more = {"gate": Gate(limit=limit or None, alpha=alpha, interleaved=bool(interleaved)), "pre": y}
    for offs, peers, biases in _groups(w, b, offsets, how):
        tile = how.tile("grouped_linear")
        by_tiles(x=x, offsets=offs, weight=peers, bias=biases, out=act, transposed=transposed, tile=tile, **more)
    return act, y if gate else y.new_empty(0)


def _hit(bounds: Bounds) -> list[int]:
    return [expert for expert, count in enumerate(_counts(bounds)) if count]


def gated(pre: torch.Tensor, gate: Sequence[float]) -> torch.Tensor:
    """The gate of [.., 2 I] -> [.., I]; gate: (limit or 0, alpha, interleaved), see `odc_kernels.experts.Gate`."""
    limit, alpha, interleaved = gate
    g, u = _halves(pre, interleaved)
    if limit:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit) + 1
    return g * torch.sigmoid(alpha * g) * u


def _halves(pre: torch.Tensor, interleaved: float) -> tuple[torch.Tensor, ...]:
    return (pre[..., ::2], pre[..., 1::2]) if interleaved else pre.chunk(2, dim=-1)


def _gated_grad(pre: torch.Tensor, dy: torch.Tensor, gate: Sequence[float]) -> torch.Tensor:
    """The gradient of what went into the gate. Explicit: an operator has no graph."""
    limit, alpha, interleaved = gate
    g, u = _halves(pre, interleaved)
    g_in, u_in = (g <= limit, u.abs() <= limit) if limit else (1, 1)
    if limit:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit) + 1
    s = torch.sigmoid(alpha * g)
    found = torch.empty_like(pre)
    dg, du = _halves(found, interleaved)
    dg.copy_(dy * u * s * (1 + alpha * g * (1 - s)) * g_in)
    du.copy_(dy * g * s * u_in)
    return found


def _groups(w: ShardedOperand, b: ShardedOperand | None, offsets: torch.Tensor, how: Choice) -> Any:
    """(offsets, weight, bias) of each kernel call: one for all experts, or one for each group that is copied here."""
    if how.source == "direct":
        yield offsets, w.row_peers(), None if b is None else b.row_peers()
        return
    biases = None if b is None else b.read()
    for first, rows in w.copied(None):
        end = first + len(rows)
        yield (
            offsets[first : end + 1].contiguous(),
            PeerShards.local(rows),
            None if biases is None else PeerShards.local(biases[first:end].clone()),
        )


_operator = torch.library.custom_op("odc::grouped_linear", _forward, mutates_args=())


@_operator.register_fake
def _(x: torch.Tensor, _: Any, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    transposed, gate = rest[-3:-1]
    columns = weight.shape[1 + transposed]
    pre = x.new_empty(x.shape[0], columns) if gate else x.new_empty(0)
    return x.new_empty(x.shape[0], columns // 2 if gate else columns), pre


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, offsets, weight, _, weight_handle, bias_handle, ctx.transposed, ctx.gate, ctx.choice = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, offsets, output[1])
    ctx.handles = weight_handle, bias_handle  # see [Note: handles]
    ctx.columns = weight.shape[2 - ctx.transposed]


def _backward(ctx: Any, dy: torch.Tensor | None, add_gradient: Callable[..., torch.Tensor]) -> tuple[Any, ...]:
    (x, offsets, pre), handles = ctx.saved_tensors, ctx.handles
    needs = [ctx.needs_input_grad[place] for place in (0, 2, 3)]
    if dy is None:
        return (None,) * 9
    if torch.is_grad_enabled():
        dx, dw, db = _differentiable(dy, x, offsets, pre, resolve(handles[0]), needs, ctx.transposed, ctx.gate)
        return dx, None, dw, db, *(None,) * 5
    dx = add_gradient(dy, x, offsets, pre, *handles, ctx.columns, *needs, ctx.transposed, ctx.gate, ctx.choice)
    return dx if needs[0] else None, *(None,) * 8


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
        return _backward(ctx, dy, _add_gradient)


_operator.register_autograd(
    lambda ctx, dy, _: _backward(ctx, dy, torch.ops.odc.grouped_linear_grad), setup_context=_save
)


def _differentiable(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    offsets: torch.Tensor,
    pre: torch.Tensor,
    w: ShardedOperand,
    needs: Sequence[bool],
    transposed: bool,
    gate: Sequence[float],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients in plain torch, with a graph."""
    if gate:
        raise RuntimeError("a fused gate has no second derivative: give its experts choice='experts=eager'")
    whole, bounds = read_whole(w.leaf), offsets.tolist()
    dx = grouped_product(dy, offsets, whole.mT if transposed else whole) if needs[0] else None
    each = dy.split(_counts(bounds))
    db = torch.stack([rows.sum(0) for rows in each]) if needs[2] else None
    if not needs[1] or x is None:
        return dx, None, db
    pairs = zip(each, x.split(_counts(bounds)), strict=True)
    return dx, torch.stack([b.T @ a if transposed else a.T @ b for a, b in pairs]), db


def _add_gradient(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    offsets: torch.Tensor,
    pre: torch.Tensor,
    weight_handle: torch.Tensor,
    bias_handle: torch.Tensor | None,
    columns: int,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
    transposed: bool,
    gate: Sequence[float],
    choice: str,
) -> torch.Tensor:
    w = resolve(weight_handle)
    how = _chosen(w, dy, choice)
    if gate:
        dy = _gated_grad(pre, dy, gate)
    weight = w if needs_dw and w.wants_gradient() else None
    bias = b if needs_db and bias_handle is not None and (b := resolve(bias_handle)).wants_gradient() else None
    dx = dy.new_empty(len(dy), columns) if needs_dx else dy.new_empty(0)
    if by_kernel(how, dy, w):
        from odc_kernels.experts import grouped_linear_dx

        for offs, peers, _ in _groups(w, None, offsets, how) if needs_dx else ():
            tile = how.tile("grouped_linear_dx")
            grouped_linear_dx(dy=dy.contiguous(), offsets=offs, weight=peers, out=dx, transposed=transposed, tile=tile)
    elif needs_dx:
        bounds = offsets.tolist()
        for expert, matrix in rows_in_turn(w, _hit(bounds), how.source):
            rows = slice(bounds[expert], bounds[expert + 1])
            torch.mm(dy[rows], matrix.T if transposed else matrix, out=dx[rows])
    if (weight is not None or bias is not None) and len(dy):
        _add(dy, x, offsets, weight, bias, transposed, how)
    return dx


_operator_grad = torch.library.custom_op(
    "odc::grouped_linear_grad", _add_gradient, mutates_args=("weight_handle", "bias_handle")
)


@_operator_grad.register_fake
def _(dy: torch.Tensor, *rest: Any) -> torch.Tensor:
    columns, needs_dx = rest[5:7]
    return dy.new_empty(dy.shape[0], columns) if needs_dx else dy.new_empty(0)


def _add(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    offsets: torch.Tensor,
    weight: ShardedOperand | None,
    bias: ShardedOperand | None,
    transposed: bool,
    how: Choice,
) -> None:
    """Adds dy_eᵀ x_e, and the sums of dy_e, to the owners of the experts that have rows."""
    fused = how.wgrad == "fused" and (how.backend == "triton" or not dy.is_cuda)
    sinks = [each.open_sink() if fused and each is not None else None for each in (weight, bias)]
    if how.backend == "triton" and x is not None and isinstance(sinks[0], PeerShards):
        from odc_kernels.experts_wgrad import grouped_wgrad

        into: Any = {"weight": sinks[0], "bias": sinks[1], "tile": how.tile("grouped_wgrad")}
        grouped_wgrad(dy=dy.contiguous(), x=x, offsets=offsets, transposed=transposed, **into)
        return
    bounds = offsets.tolist()
    left, right = (x, dy) if transposed else (dy, x)
    for operand, sink in zip((weight, bias), sinks, strict=True):
        if operand is None:
            continue
        # Plain torch can't add to shards while others' kernels do.
        made = dy.new_empty(1, *operand.shape[1:]) if callable(sink) else dy.new_zeros(operand.shape)
        for owner, expert in in_turn(operand, _hit(bounds)):
            rows, part = slice(bounds[expert], bounds[expert + 1]), made[0 if callable(sink) else expert]
            if operand is bias:
                torch.sum(dy[rows], 0, out=part)
            elif left is not None and right is not None:  # x is saved where the weight trains
                torch.mm(left[rows].T, right[rows], out=part)  # autocast leaves it alone
            if callable(sink):
                sink(owner, expert - operand.first_row(owner), made)
        if not callable(sink):
            operand.add_gradient(made)


def _chosen(w: ShardedOperand, x: torch.Tensor, choice: str) -> Choice:
    return chosen("experts", w, len(x), x.device, choice)
