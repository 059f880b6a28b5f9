"""q, k and v of an attention layer, with norm and RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from odc_kernels.peers import PeerShards

from ..choice import AUTO, Choice, choices
from ..operand import ShardedOperand, resolve
from .linear import linear, matrix
from .whole import chosen, handle, operand, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMSNorm of each head of q and of k before RoPE: weights [D]."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def is_fused(x: torch.Tensor, weights: Sequence[torch.Tensor], choice: str = AUTO) -> bool:
    """True if `qkv` would use one kernel: it was chosen and all weights are sharded and of x's dtype."""
    where = {"shape": tuple(weights[0].shape), "device_type": x.device.type}
    found = choices("qkv", **where, given=choice, table=table_of(weights[0]))
    return found[0].is_by_kernel and x.numel() > 0 and operand(x, *weights) is not None


def qkv(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    head_dim: int,
    norm: HeadNorm | None = None,
    choice: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The heads of q, k and v: projection, bias, norm of each head, rotary embedding (`rotate_half`'s, whole heads).

    | | shape | dtype |
    | --- | --- | --- |
    | x | [..., K] | weights' |
    | weights | wq [Hq D, K], wk and wv [Hkv D, K] | any for "eager"; fp32, bf16, fp16 for "triton" |
    | biases | bq, bk, bv of as many rows, or None | weights' |
    | cos, sin | [..., D], both halves alike, of x's leading shape or one that expands to it | any |
    | result | q [..., Hq, D], k and v [..., Hkv, D] | weights' |

    "eager": the three products, then torch; "triton": one kernel, whose backward adds the weights' gradients to their
    owners. It saves x, cos, sin, a number per token and, with a norm, its weights and the projections before it. It has
    no second derivative.

    Raises ValueError for a choice that is unknown or can't run here, and the kernel's errors for such shapes.
    """
    parameters = (*weights, *(biases or ()))
    if not is_fused(x, parameters, choice) or cos.requires_grad or sin.requires_grad:
        q, k, v = (
            linear(x, weight, bias, choice=choice).unflatten(-1, (-1, head_dim))
            for weight, bias in zip(weights, biases or (None, None, None), strict=True)
        )
        if norm is not None:
            q, k = _normed(q, norm.q_weight, norm.eps), _normed(k, norm.k_weight, norm.eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v
    lead = x.shape[:-1]
    places = torch.arange(cos.shape[:-1].numel(), device=x.device).view(cos.shape[:-1])
    taken = operand(x, *parameters)
    assert taken is not None, "`is_fused` has asked for it"
    q, k, v, _, _ = torch.ops.odc.qkv(
        matrix(taken),
        list(parameters),
        list(map(handle, parameters)),
        [] if norm is None else [norm.q_weight, norm.k_weight],
        1.0 if norm is None else norm.eps,
        [matrix(cos), matrix(sin), places.expand(lead).reshape(-1).contiguous()],
        head_dim,
        choice,
    )
    return tuple(heads.view(*lead, *heads.shape[1:]) for heads in (q, k, v))


def _normed(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(heads.dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of heads [..., H, D]; cos, sin: [..., D]."""
    first, second = heads.chunk(2, dim=-1)
    rotated = heads * cos.unsqueeze(-2) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(-2)
    return rotated.to(heads.dtype)


@torch.library.custom_op("odc::qkv", mutates_args=())
def _qkv(
    x: torch.Tensor,
    parameters: list[torch.Tensor],
    handles: list[torch.Tensor],
    norms: list[torch.Tensor],
    eps: float,
    rope: list[torch.Tensor],
    head_dim: int,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`norms`: weights of q's and k's, or none; `rope`: cos, sin, positions. Also returns q and k before the norms."""
    from odc_kernels.qkv import qkv as by_kernel  # here, as importing triton takes a second

    sharded = [resolve(handle) for handle in handles]
    q, k, v, q_pre, k_pre = found = _empty(x, parameters, norms, head_dim)
    how = chosen("qkv", sharded[0], len(x), x.device, choice)
    saved: Any = {"q_pre": q_pre, "k_pre": k_pre} if norms else {"q_pre": None, "k_pre": None}
    by_kernel(x=x, weights=_weights(sharded, how), **_norm_and_rope(norms, eps, rope), q=q, k=k, v=v, **saved)
    return found


def _norm_and_rope(norms: list[torch.Tensor], eps: float, rope: list[torch.Tensor]) -> dict[str, Any]:
    from odc_kernels.qkv_inputs import QkNorm, Rope

    cos, sin, positions = rope
    norm = QkNorm(q_weight=norms[0].detach(), k_weight=norms[1].detach(), eps=eps) if norms else None
    return {"norm": norm, "rope": Rope(cos=cos, sin=sin, positions=positions)}


def _empty(
    x: torch.Tensor, parameters: list[torch.Tensor], norms: list[torch.Tensor], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x.new_empty(x.shape[0], parameter.shape[0] // head_dim, head_dim) for parameter in parameters[:3])
    q_pre, k_pre = (torch.empty_like(each) if norms else x.new_empty(0) for each in (q, k))
    return q, k, v, q_pre, k_pre


@_qkv.register_fake
def _(x: torch.Tensor, parameters: Any, handles: Any, norms: Any, eps: Any, rope: Any, head_dim: int, *_: Any) -> Any:
    return _empty(x, parameters, norms, head_dim)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, _, ctx.handles, norms, ctx.eps, rope, _, ctx.choice = inputs
    q_pre, k_pre = output[3:]
    ctx.mark_non_differentiable(q_pre, k_pre)
    ctx.save_for_backward(x, q_pre, k_pre, *rope, *norms)


def _backward(
    ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | Sequence[torch.Tensor | None] | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("the fused projection of q, k and v has no second derivative: give it choice='qkv=eager'")
    x, q_pre, k_pre, cos, sin, positions, *norms = ctx.saved_tensors
    dx, dq_norm, dk_norm = torch.ops.odc.qkv_grad(
        dq, dk, dv, x, ctx.handles, norms, ctx.eps, [cos, sin, positions], q_pre, k_pre, ctx.choice
    )
    nothing = [None] * len(ctx.handles)
    return dx, nothing, nothing, [dq_norm, dk_norm][: len(norms)], None, [None] * 3, None, None


_qkv.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("odc::qkv_grad", mutates_args=("handles",))
def _qkv_grad(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    x: torch.Tensor,
    handles: list[torch.Tensor],
    norms: list[torch.Tensor],
    eps: float,
    rope: list[torch.Tensor],
    q_pre: torch.Tensor,
    k_pre: torch.Tensor,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from odc_kernels.qkv_grad import QkvGradients
    from odc_kernels.qkv_grad import qkv_grad as by_kernel

    sharded = [resolve(handle) for handle in handles]
    how = chosen("qkv", sharded[0], len(x), x.device, choice)
    dx, dq_norm, dk_norm = _empty_gradients(x, norms)
    targets = [
        _GradientSink(each, how) if each.leaf.requires_grad and each.wants_gradient() else None for each in sharded
    ]
    named = zip(("wq", "wk", "wv", "bq", "bk", "bv"), targets, strict=False)
    out: dict[str, Any] = {name: target.peers for name, target in named if target is not None}
    if norms:
        out |= {"q_norm": dq_norm, "k_norm": dk_norm}
    by_kernel(
        dq=dq.contiguous(),
        dk=dk.contiguous(),
        dv=dv.contiguous(),
        x=x,
        weights=_weights(sharded, how),
        **_norm_and_rope(norms, eps, rope),
        q_pre=q_pre if norms else None,
        k_pre=k_pre if norms else None,
        out=QkvGradients(dx=dx, **out),
    )
    for target in targets:
        if target is not None:
            target.finish()
    dtype = norms[0].dtype if norms else x.dtype
    return dx, dq_norm.to(dtype), dk_norm.to(dtype)


def _empty_gradients(x: torch.Tensor, norms: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = norms[0].shape if norms else (0,)
    dq_norm, dk_norm = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), dq_norm, dk_norm


@_qkv_grad.register_fake
def _(dq: Any, dk: Any, dv: Any, x: torch.Tensor, handles: Any, norms: list[torch.Tensor], *_: Any) -> Any:
    dx, dq_norm, dk_norm = _empty_gradients(x, norms)
    dtype = norms[0].dtype if norms else x.dtype
    return dx, dq_norm.to(dtype), dk_norm.to(dtype)


class _GradientSink:
    """The target of one parameter's gradient: its owners, or a tensor that is added to them afterwards."""

    def __init__(self, parameter: ShardedOperand, how: Choice) -> None:
        self._parameter = parameter
        self._whole: torch.Tensor | None = None
        sink = parameter.open_sink() if how.wgrad == "fused" else None
        if not isinstance(sink, PeerShards):
            self._whole = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.leaf.device)
            sink = PeerShards.local(self._whole)
        self.peers = sink

    def finish(self) -> None:
        if self._whole is not None:
            self._parameter.add_gradient(self._whole)


def _weights(sharded: list[ShardedOperand], how: Choice) -> Any:
    from odc_kernels.qkv_inputs import QkvWeights

    if how.source == "direct":
        peers = [each.compute_peers for each in sharded]
    else:
        peers = [PeerShards.local(*each.parts("gathered")) for each in sharded]
    return QkvWeights(**dict(zip(("wq", "wk", "wv", "bq", "bk", "bv"), peers, strict=False)))
