"""The head's log-probabilities; its logits are never whole."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from odc_kernels.peers import PeerShards

from ..choice import AUTO, TABLE, choose
from ..operand import AddRows, add_rows, resolve

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def checked_targets(targets: torch.Tensor, of: torch.Tensor, vocabulary: int, ignore_index: int) -> torch.Tensor:
    """In int64. Raises ValueError unless targets are integers [...] for `of` [..., D], IndexError for one outside."""
    if targets.shape != of.shape[:-1] or targets.dtype not in _INTEGERS:
        raise ValueError(
            f"targets are {tuple(targets.shape)} of {targets.dtype}; with {tuple(of.shape)} give "
            f"{tuple(of.shape[:-1])} of torch.int64"
        )
    targets = targets.long()
    is_traced = torch.compiler.is_compiling() or is_functorch_wrapped_tensor(targets)
    # Only where there are values, and no synchronisation on a GPU: such a target's logp is NaN.
    if type(of) is torch.Tensor and of.device.type == "cpu" and not is_traced:
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))]
        if wrong.numel():
            raise IndexError(
                f"target {int(wrong[0])} is outside the vocabulary of {vocabulary}; ignored is {ignore_index}"
            )
    return targets


def token_log_probs(
    h: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    choice: str = AUTO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logp[t] = z[t, y_t] - logsumexp_v z[t, v] and the entropy of softmax(z[t]), with z = scale h Wᵀ never whole.

    | | shape | dtype |
    | --- | --- | --- |
    | h | [..., D] | weight's, else it is cast |
    | weight | [V, D], sharded or not | fp32, bf16, fp16 |
    | targets | [...] | integers |
    | logp, entropy | [...] | fp32 |

    forward: online softmax over chunks of the vocabulary; logp is 0 where a target is `ignore_index`. dgrad: dh = sum
    over chunks of dz W. wgrad: dW of a chunk = dzᵀ h, added to its owner before the next. Saved: h, targets and three
    numbers per token, and the weight of an unsharded head; never a gathered one. Logits are recomputed. A second
    derivative is refused.

    Raises IndexError for a target outside 0..V-1 (on a GPU its logp is NaN), ValueError for other shapes and dtypes,
    and for a choice that is unknown or can't run here.
    """
    targets = checked_targets(targets, h, weight.shape[0], ignore_index)
    flat = h.reshape(-1, h.shape[-1]).to(weight.dtype).contiguous()
    handle = getattr(weight, "_odc_handle", None)
    logp, entropy, _ = torch.ops.odc.token_log_probs(
        flat, weight, handle, targets.reshape(-1), ignore_index, scale, choice
    )
    return logp.view(targets.shape), entropy.view(targets.shape)


@torch.library.custom_op("odc::token_log_probs", mutates_args=())
def _token_log_probs(
    h: torch.Tensor,
    weight: torch.Tensor,
    handle: torch.Tensor | None,
    targets: torch.Tensor,
    ignore_index: int,
    scale: float,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from odc_kernels.linear_cross_entropy import linear_cross_entropy  # here, as importing triton takes a second

    output = linear_cross_entropy(
        h=h,
        weight=peers_of(handle, weight),
        targets=targets,
        ignore_index=ignore_index,
        logit_scale=scale,
        eager=is_eager(h, weight.shape, handle, choice),
    )
    return output.logp, output.entropy, output.lse


@_token_log_probs.register_fake
def _(h: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(h.new_empty(h.shape[0], dtype=torch.float32) for _ in range(3))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    h, weight, ctx.handle, targets, ctx.ignore_index, ctx.scale, ctx.choice = inputs
    logp, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    own = weight if ctx.handle is None else None  # a sharded one may have no memory to save
    ctx.save_for_backward(h, own, targets, logp, entropy, lse)


def _backward(
    ctx: Any, g_logp: torch.Tensor | None, g_entropy: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    refuse_second_derivative()
    h, weight, targets, logp, entropy, lse = ctx.saved_tensors
    needs_dh, needs_dw = ctx.needs_input_grad[:2]
    if g_logp is None:
        g_logp = torch.zeros_like(logp)
    rest = (needs_dh, needs_dw, ctx.ignore_index, ctx.scale, ctx.choice)
    dh, dw = torch.ops.odc.token_log_probs_grad(
        h, weight, ctx.handle, targets, logp, entropy, lse, g_logp, g_entropy, *rest
    )
    own_dw = dw if needs_dw and ctx.handle is None else None
    return dh if needs_dh else None, own_dw, None, None, None, None, None


_token_log_probs.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("odc::token_log_probs_grad", mutates_args=("handle",))
def _token_log_probs_grad(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    handle: torch.Tensor | None,
    targets: torch.Tensor,
    logp: torch.Tensor,
    entropy: torch.Tensor,
    lse: torch.Tensor,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor | None,
    needs_dh: bool,
    needs_dw: bool,
    ignore_index: int,
    scale: float,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    from odc_kernels.linear_cross_entropy import HeadOutput, linear_cross_entropy_grad

    peers = peers_of(handle, weight)
    dh = torch.empty_like(h) if needs_dh else h.new_empty(0)
    dw, sink = head_sink(handle, peers, h) if needs_dw else (None, None)
    linear_cross_entropy_grad(
        h=h,
        weight=peers,
        targets=targets,
        output=HeadOutput(logp=logp, lse=lse, entropy=entropy),
        g_logp=g_logp,
        g_entropy=g_entropy,
        gradient=sink,
        dh=dh if needs_dh else None,
        ignore_index=ignore_index,
        logit_scale=scale,
        eager=is_eager(h, peers.shape, handle, choice),
    )
    return dh, h.new_empty(0) if dw is None else dw.to(h.dtype)


@_token_log_probs_grad.register_fake
def _(h: torch.Tensor, weight: torch.Tensor | None, handle: torch.Tensor | None, *rest: Any) -> tuple[Any, Any]:
    return gradients_like(h, weight, handle, *rest[6:8])  # after targets, logp, entropy, lse, g_logp, g_entropy


def gradients_like(
    h: torch.Tensor, weight: torch.Tensor | None, handle: torch.Tensor | None, needs_dh: bool, needs_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a head's backward operator returns: empty what is not wanted, or is added to the owners."""
    dh = torch.empty_like(h) if needs_dh else h.new_empty(0)
    return dh, torch.empty_like(weight) if needs_dw and handle is None and weight is not None else h.new_empty(0)


def refuse_second_derivative() -> None:
    """In a head's backward with create_graph: its result has no graph, so its gradient would be lost."""
    if torch.is_grad_enabled():
        raise RuntimeError("the fused head has no second derivative: leave the role 'head' out of replace_layers")


def head_sink(
    handle: torch.Tensor | None, peers: PeerShards, h: torch.Tensor
) -> tuple[torch.Tensor | None, PeerShards | AddRows | None]:
    """An unsharded head's gradient, in fp32 or fp64, and what adds to it, or to a sharded one's; None: not wanted."""
    if handle is not None:
        sharded = resolve(handle)
        return None, sharded.open_sink() if sharded.wants_gradient() else None
    dw = torch.zeros(peers.shape, dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)
    return dw, lambda _, at, rows: add_rows(dw, at, rows)


def is_eager(h: torch.Tensor, shape: tuple[int, ...], handle: torch.Tensor | None, choice: str) -> bool:
    where = {"shape": tuple(shape), "tokens": len(h), "device_type": h.device.type}
    table = TABLE if handle is None else resolve(handle).table
    return choose("log_probs", **where, given=choice, table=table).backend == "eager"


def peers_of(handle: torch.Tensor | None, weight: torch.Tensor | None) -> PeerShards:
    if handle is not None:
        return resolve(handle).compute_peers
    assert weight is not None, "a head is sharded, or has a weight"
    return PeerShards.local(weight.detach())
