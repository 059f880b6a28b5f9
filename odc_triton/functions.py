"""Operators on sharded parameters, inside autograd.

Each takes the parameter as its module's forward sees it, sharded or not, as a differentiable input. The gradient of a
sharded one goes straight to its owners, so autograd is given None for it.
"""

from __future__ import annotations

from typing import Any

import torch

from odc_kernels.linear_cross_entropy import AddRows, HeadOutput, linear_cross_entropy, linear_cross_entropy_grad
from odc_kernels.peers import PeerShards

from .sharded_param import ShardedParameter, sharded_parameter


class _TokenLogProbs(torch.autograd.Function):
    """logp[t] = z[t, y_t] - logsumexp_v z[t, v] and the entropy of softmax(z[t]), with z = scale h Wᵀ never whole.

    | | shape | dtype |
    | --- | --- | --- |
    | h | [T, D] | fp32, bf16, fp16 |
    | weight | [V, D], maybe without storage: it is read from its owners | h's |
    | targets | [T] | int64 |
    | logp, entropy | [T] | fp32 |

    forward: chunk by chunk of the vocabulary, online softmax. dgrad: dh = sum over chunks of dz W. wgrad: dW of a chunk
    = dzᵀ h, added to its owner before the next. Saved: h, targets and three numbers per token,
    of an unsharded head its weight; never a gathered one, and logits are made again. A second derivative is refused.
    """

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.sharded = sharded_parameter(weight)
        ctx.options = {"ignore_index": ignore_index, "logit_scale": scale}
        output = linear_cross_entropy(h=h, weight=_peers(ctx.sharded, weight), targets=targets, **ctx.options)
        own = [weight] if ctx.sharded is None else []  # a sharded one may have no memory to save
        ctx.save_for_backward(h, targets, output.logp, output.lse, output.entropy, *own)
        return output.logp, output.entropy

    @staticmethod
    def backward(
        ctx: Any, g_logp: torch.Tensor | None, g_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what is given here has no graph, so its own gradient would be lost
            raise RuntimeError("the fused head has no second derivative: leave the role 'head' out of replace_layers")
        h, targets, logp, lse, entropy, *own = ctx.saved_tensors
        weight = own[0] if own else None
        needs_dh, needs_dw = ctx.needs_input_grad[:2]
        dh = torch.empty_like(h) if needs_dh else None
        dw, sink = None, None
        if needs_dw and ctx.sharded is not None:
            sink = ctx.sharded.gradient_sink
            ctx.sharded.touched = True
        elif needs_dw:
            dw = torch.zeros_like(weight, dtype=torch.float32)
            sink = _adds_to(dw)
        linear_cross_entropy_grad(
            h=h,
            weight=_peers(ctx.sharded, weight),
            targets=targets,
            output=HeadOutput(logp=logp, lse=lse, entropy=entropy),
            g_logp=torch.zeros_like(logp) if g_logp is None else g_logp,
            g_entropy=g_entropy,
            gradient=sink,
            dh=dh,
            **ctx.options,
        )
        return dh, None if dw is None else dw.to(h.dtype), None, None, None


def _peers(sharded: ShardedParameter | None, weight: torch.Tensor | None) -> PeerShards:
    if sharded is not None:
        return sharded.compute_peers
    return PeerShards.of([weight.detach()], shape=weight.shape, aligned=weight.is_cuda)


def _adds_to(whole: torch.Tensor) -> AddRows:
    def add_rows(owner: int, start: int, rows: torch.Tensor) -> None:
        whole[start : start + len(rows)].add_(rows)

    return add_rows


def token_log_probs(
    h: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets` [...] under softmax(scale h Wᵀ), and its entropy; fp32 [...], both with gradients.

    h: [..., D]; weight: [V, D], sharded or not. logp is 0 where a target is `ignore_index`. Logits are never whole.
    Raises ValueError for other shapes and dtypes.
    """
    if targets.shape != h.shape[:-1]:
        raise ValueError(f"targets are {tuple(targets.shape)}; with h of {tuple(h.shape)} give {tuple(h.shape[:-1])}")
    flat = h.reshape(-1, h.shape[-1]).to(weight.dtype).contiguous()
    logp, entropy = _TokenLogProbs.apply(flat, weight, targets.reshape(-1), ignore_index, scale)
    return logp.view(targets.shape), entropy.view(targets.shape)


class _Whole(torch.autograd.Function):
    """The whole tensor of a parameter that is read on demand, for once; its gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return sharded_parameter(weight).read()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def whole_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` with its memory: itself, or a copy read from its owners where it has none."""
    if weight.numel() and weight.untyped_storage().nbytes() == 0:
        return _Whole.apply(weight)
    return weight
