"""The divergence between two heads' distributions; neither's logits are ever whole."""

from __future__ import annotations

from typing import Any

import torch

from .log_probs import gradients_like, head_sink, is_eager, peers_of, refuse_second_derivative


def token_divergence(
    h: torch.Tensor,
    weight: torch.Tensor,
    teacher_h: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    beta: float,
    scale: float = 1.0,
    teacher_scale: float = 1.0,
    choice: str,
) -> torch.Tensor:
    """The divergence of softmax(scale h Wᵀ) from the teacher's softmax of that kind, of each token.

    | | shape | dtype |
    | --- | --- | --- |
    | h | [..., D] | weight's, else it is cast |
    | weight | [V, D], sharded or not | fp32, bf16, fp16; in plain torch fp64 |
    | teacher_h, teacher_weight | [..., D'], [V', D'], sharded or not | the same, or another one |
    | result | [...] | fp32, for fp64 fp64 |

    `beta` as in `odc_triton.divergence`. Saved: h of both and three numbers per token, and weights of unsharded heads.
    The teacher gets no gradient. A second derivative is refused. Raises ValueError for other shapes and dtypes.
    """
    flat = [
        each.reshape(-1, each.shape[-1]).to(of.dtype).contiguous()
        for each, of in ((h, weight), (teacher_h.detach(), teacher_weight))
    ]
    handles = [getattr(each, "_odc_handle", None) for each in (weight, teacher_weight)]
    found, *_ = torch.ops.odc.token_divergence(
        flat[0], weight, flat[1], teacher_weight.detach(), *handles, beta, scale, teacher_scale, choice
    )
    return found.view(h.shape[:-1])


@torch.library.custom_op("odc::token_divergence", mutates_args=())
def _token_divergence(
    h: torch.Tensor,
    weight: torch.Tensor,
    teacher_h: torch.Tensor,
    teacher_weight: torch.Tensor,
    handle: torch.Tensor | None,
    teacher_handle: torch.Tensor | None,
    beta: float,
    scale: float,
    teacher_scale: float,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from odc_kernels.linear_divergence import HeadInput, linear_divergence  # here, as importing triton takes a second

    student = HeadInput(h=h, weight=peers_of(handle, weight), scale=scale)
    teacher = HeadInput(h=teacher_h, weight=peers_of(teacher_handle, teacher_weight), scale=teacher_scale)
    eager = is_eager(h, weight.shape, handle, choice)
    found = linear_divergence(student=student, teacher=teacher, beta=beta, eager=eager)
    return found.divergence, found.own, found.lse, found.lse_teacher


@_token_divergence.register_fake
def _(h: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    wide = torch.promote_types(h.dtype, torch.float32)
    return tuple(h.new_empty(h.shape[0], dtype=wide) for _ in range(4))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    h, weight, teacher_h, teacher_weight, ctx.handle, ctx.teacher_handle, *ctx.rest = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    own = [each if of is None else None for each, of in ((weight, ctx.handle), (teacher_weight, ctx.teacher_handle))]
    ctx.save_for_backward(h, teacher_h, *own, *output)  # sharded ones may have no memory to save


def _backward(ctx: Any, g: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    refuse_second_derivative()
    needs = ctx.needs_input_grad[:2]
    if g is None or not any(needs):
        return (None,) * 10
    dh, dw = torch.ops.odc.token_divergence_grad(
        *ctx.saved_tensors, g, ctx.handle, ctx.teacher_handle, *needs, *ctx.rest
    )
    return dh if needs[0] else None, dw if needs[1] and ctx.handle is None else None, *(None,) * 8


_token_divergence.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("odc::token_divergence_grad", mutates_args=("handle",))
def _token_divergence_grad(
    h: torch.Tensor,
    teacher_h: torch.Tensor,
    weight: torch.Tensor | None,
    teacher_weight: torch.Tensor | None,
    divergence: torch.Tensor,
    own: torch.Tensor,
    lse: torch.Tensor,
    lse_teacher: torch.Tensor,
    g: torch.Tensor,
    handle: torch.Tensor | None,
    teacher_handle: torch.Tensor | None,
    needs_dh: bool,
    needs_dw: bool,
    beta: float,
    scale: float,
    teacher_scale: float,
    choice: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    from odc_kernels.linear_divergence import DivergenceOutput, HeadInput, linear_divergence_grad

    peers = peers_of(handle, weight)
    dh = torch.empty_like(h) if needs_dh else None
    dw, sink = head_sink(handle, peers, h) if needs_dw else (None, None)
    linear_divergence_grad(
        student=HeadInput(h=h, weight=peers, scale=scale),
        teacher=HeadInput(h=teacher_h, weight=peers_of(teacher_handle, teacher_weight), scale=teacher_scale),
        beta=beta,
        output=DivergenceOutput(divergence=divergence, own=own, lse=lse, lse_teacher=lse_teacher),
        g=g.contiguous(),
        gradient=sink,
        dh=dh,
        eager=is_eager(h, peers.shape, handle, choice),
    )
    return h.new_empty(0) if dh is None else dh, h.new_empty(0) if dw is None else dw.to(h.dtype)


@_token_divergence_grad.register_fake
def _(h: torch.Tensor, _: torch.Tensor, weight: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    handle, _, *needs = rest[6:10]  # after the teacher's weight, four outputs and g
    return gradients_like(h, weight, handle, *needs)
