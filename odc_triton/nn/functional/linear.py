"""y = x Wᵀ + b with W and b on their owners.

[Note: two ways in] On the host a custom operator takes longer than a small product, mostly in torch's wrappers. A model
calls it hundreds of times per microbatch, so outside of `torch.compile` an autograd function calls the operator's
forward and backward directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from odc_kernels.peers import PeerShards

from ..choice import AUTO, Choice
from ..operand import ShardedOperand, resolve
from .whole import chosen, handle, operand, read_whole, whole_weight


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, choice: str = AUTO
) -> torch.Tensor:
    """x Wᵀ + b: `torch.nn.functional.linear`, for sharded parameters too.

    | | shape | dtype |
    | --- | --- | --- |
    | x | [..., K] | any floating point for "eager"; fp32, bf16, fp16 for "triton" |
    | weight | [N, K] | x's |
    | bias | [N] or None | x's |
    | result | [..., N] | x's |

    forward: y = x Wᵀ + b. dgrad: dx = dy W. wgrad: dW = dyᵀ x and db = sum of dy, added to their owners. Saved: x, if
    the weight trains, and the handles; W is read again. A second derivative, and autocast if the parameters have
    another dtype, use plain torch on the whole weight, which is then saved.

    choice: see docs/layers.md. Raises ValueError for one that is unknown or can't run here.
    """
    ready = operand(x, weight, bias)
    if ready is None:
        return F.linear(x, whole_weight(weight), None if bias is None else whole_weight(bias))
    call = torch.ops.odc.linear if torch.compiler.is_compiling() else _LinearFunction.apply  # see [Note: two ways in]
    return call(ready, weight, bias, handle(weight), handle(bias), choice)


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_handle: torch.Tensor,
    bias_handle: torch.Tensor | None,
    choice: str,
) -> torch.Tensor:
    w = resolve(weight_handle)
    b = None if bias_handle is None else resolve(bias_handle)
    how = _chosen(w, x, choice)
    if not by_kernel(how, x, w):
        biases = [None] * w.world if b is None else b.parts(how.source)
        outputs = [F.linear(x, rows, part) for rows, part in zip(w.parts(how.source), biases, strict=False)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    from odc_kernels.linear import linear as direct  # here, as importing triton takes a second
    from odc_kernels.linear_staged import linear_staged

    y = x.new_empty(*x.shape[:-1], w.shape[0])
    flat = {"x": matrix(x), "out": matrix(y), "bias": None if b is None else b.compute_peers}
    if how.source == "direct":
        direct(weight=w.compute_peers, tile=how.tile("linear"), **flat)
    else:
        linear_staged(weight=w.pull(), tile=how.tile("linear_staged"), **flat)
    return y


_operator = torch.library.custom_op("odc::linear", _forward, mutates_args=())


@_operator.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, _, weight_handle, bias_handle, choice = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
    ctx.handles = weight_handle, bias_handle  # see [Note: handles]
    ctx.columns, ctx.choice = weight.shape[1], choice


def _backward(ctx: Any, dy: torch.Tensor, add_gradient: Callable[..., torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    (x,), (weight_handle, bias_handle) = ctx.saved_tensors, ctx.handles
    needs = ctx.needs_input_grad[:3]
    if torch.is_grad_enabled():
        return *_differentiable(dy, x, resolve(weight_handle), needs), None, None, None
    dx = add_gradient(dy, x, weight_handle, bias_handle, ctx.columns, *needs, ctx.choice)
    return dx if needs[0] else None, None, None, None, None, None


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, dy, _add_gradient)


_operator.register_autograd(lambda ctx, dy: _backward(ctx, dy, torch.ops.odc.linear_grad), setup_context=_save)


def _differentiable(
    dy: torch.Tensor, x: torch.Tensor | None, w: ShardedOperand, needs: tuple[bool, bool, bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients in plain torch, with a graph."""
    dx = dy @ read_whole(w.leaf) if needs[0] else None
    dw = matrix(dy).T @ matrix(x) if needs[1] and x is not None else None
    return dx, dw, matrix(dy).sum(0) if needs[2] else None


def _add_gradient(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight_handle: torch.Tensor,
    bias_handle: torch.Tensor | None,
    columns: int,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
    choice: str,
) -> torch.Tensor:
    w = resolve(weight_handle)
    how = _chosen(w, dy, choice)
    dx = _dx(dy, w, how) if needs_dx else dy.new_empty(0)
    weight = w if needs_dw and w.wants_gradient() else None
    bias = b if needs_db and bias_handle is not None and (b := resolve(bias_handle)).wants_gradient() else None
    if weight is not None or bias is not None:
        add_linear_gradient(matrix(dy), None if x is None else matrix(x), weight, bias, how)
    return dx


_operator_grad = torch.library.custom_op(
    "odc::linear_grad", _add_gradient, mutates_args=("weight_handle", "bias_handle")
)


@_operator_grad.register_fake
def _(dy: torch.Tensor, x: Any, weight_handle: Any, bias_handle: Any, columns: int, needs_dx: bool, *_: Any) -> Any:
    return dy.new_empty(*dy.shape[:-1], columns) if needs_dx else dy.new_empty(0)


def _dx(dy: torch.Tensor, w: ShardedOperand, how: Choice) -> torch.Tensor:
    if by_kernel(how, dy, w):
        from odc_kernels.linear import linear_dx
        from odc_kernels.linear_staged import linear_dx_staged

        dx = dy.new_empty(*dy.shape[:-1], w.shape[1])
        if how.source == "direct":
            linear_dx(dy=matrix(dy), weight=w.compute_peers, out=matrix(dx), tile=how.tile("linear_dx"))
        else:
            linear_dx_staged(dy=matrix(dy), weight=w.pull(), out=matrix(dx), tile=how.tile("linear_dx_staged"))
        return dx
    parts = w.parts(how.source)
    if len(parts) == 1:
        return dy @ parts[0]
    wide = torch.promote_types(dy.dtype, torch.float32)  # a sum over owners must not be rounded after each
    dx = dy.new_zeros(*dy.shape[:-1], w.shape[1], dtype=wide)
    for part, columns in zip(parts, dy.split([len(part) for part in parts], dim=-1), strict=True):
        dx += (columns @ part).to(wide)
    return dx.to(dy.dtype)


def add_linear_gradient(
    dy: torch.Tensor, x: torch.Tensor | None, weight: ShardedOperand | None, bias: ShardedOperand | None, how: Choice
) -> None:
    """Adds dyᵀ x to the owners of the weight and the sum of dy to those of the bias; dy: [T, N], x: [T, K]."""
    sink = weight.open_sink() if weight is not None and how.wgrad == "fused" and len(dy) > 0 else None
    if isinstance(sink, PeerShards) and how.backend == "triton":
        from odc_kernels.wgrad import wgrad

        biases = None if bias is None else bias.open_sink()
        wgrad(dy=dy, x=x, weight=sink, bias=biases, tile=how.tile("wgrad"))
        return
    if weight is not None and x is not None:
        if sink is None or isinstance(sink, PeerShards):  # plain torch can't add to shards while others' kernels do
            weight.add_gradient(dy.T @ x)
        else:
            for owner in weight.owners_from_own():
                rows = dy[:, weight.first_row(owner) : weight.first_row(owner + 1)]
                sink(owner, 0, rows.T @ x)
    if bias is not None:
        bias.add_gradient(dy.sum(0))


def _chosen(w: ShardedOperand, x: torch.Tensor, choice: str) -> Choice:
    return chosen("linear", w, x.numel() // max(x.shape[-1], 1), x.device, choice)


def by_kernel(how: Choice, x: torch.Tensor, weight: ShardedOperand) -> bool:
    """True if Triton's kernel computes the product: not for gathered weights (the library does), nor if empty."""
    return how.backend == "triton" and how.source != "gathered" and x.numel() > 0 and 0 not in weight.shape


def matrix(x: torch.Tensor) -> torch.Tensor:
    """[..., K] as a contiguous [T, K]."""
    return x.reshape(-1, x.shape[-1]).contiguous()
