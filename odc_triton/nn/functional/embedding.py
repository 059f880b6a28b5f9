"""Rows of a sharded table."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from odc_kernels.peers import PeerShards

from ..choice import AUTO
from ..operand import resolve
from .whole import chosen, handle, whole_weight


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None, choice: str = AUTO
) -> torch.Tensor:
    """W[ids]: `torch.nn.functional.embedding`, for a sharded table too.

    | | shape | dtype |
    | --- | --- | --- |
    | ids | [...] | int64, int32 |
    | weight | [V, K] | any floating point for "eager"; fp32, bf16, fp16 for "triton" |
    | result | [..., K] | weight's |

    forward: only the rows of `ids` are read. wgrad: rows of equal ids are summed in fp32, then each distinct row is
    added to its owner; `padding_idx`, from the end if negative, has no gradient. Saved: the ids and the handle. A
    second derivative goes through plain torch.

    choice: see docs/layers.md. Raises ValueError for one that is unknown or can't run here, IndexError for an
    id outside 0..V-1; "triton" can't check without a synchronisation, and gives NaN.
    """
    if getattr(weight, "_odc_handle", None) is None or ids.dtype not in (torch.int64, torch.int32):
        return F.embedding(ids, whole_weight(weight), padding_idx)
    if padding_idx is not None:
        rows = weight.shape[0]
        if not -rows <= padding_idx < rows:
            raise ValueError(f"padding_idx is {padding_idx}; with {rows} rows give {-rows} to {rows - 1}, or None")
        padding_idx %= rows
    return torch.ops.odc.embedding(ids, weight, handle(weight), padding_idx, choice)


@torch.library.custom_op("odc::embedding", mutates_args=())
def _embedding(
    ids: torch.Tensor, weight: torch.Tensor, handle: torch.Tensor, padding_idx: int | None, choice: str
) -> torch.Tensor:
    w = resolve(handle)
    how = chosen("embedding", w, ids.numel(), ids.device, choice)
    if how.backend == "triton" and how.source == "direct":
        from odc_kernels.embedding import embedding as rows_by_kernel  # here, as importing triton takes a second

        out = torch.empty(*ids.shape, w.shape[1], dtype=w.dtype, device=ids.device)
        rows_by_kernel(ids=ids.reshape(-1).contiguous(), weight=w.compute_peers, out=out.view(-1, w.shape[1]))
        return out
    parts = w.parts(how.source)
    if len(parts) == 1:
        return F.embedding(ids, parts[0])
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < w.shape[0]:
        raise IndexError(f"ids are in {int(ids.min())}..{int(ids.max())}; the table has rows 0..{w.shape[0] - 1}")
    out = torch.empty(*ids.shape, w.shape[1], dtype=w.dtype, device=ids.device)
    for owner, part in enumerate(parts):
        here = (ids >= w.first_row(owner)) & (ids < w.first_row(owner + 1))
        out[here] = part[ids[here] - w.first_row(owner)]
    return out


@_embedding.register_fake
def _(ids: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


def _save(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    ids, _, ctx.handle, ctx.padding_idx, ctx.choice = inputs
    ctx.save_for_backward(ids)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (ids,), handle = ctx.saved_tensors, ctx.handle
    dw = None
    if torch.is_grad_enabled():
        leaf = resolve(handle).leaf
        trains = (ids != (-1 if ctx.padding_idx is None else ctx.padding_idx)).unsqueeze(-1)
        dw = torch.zeros(leaf.shape, dtype=dy.dtype, device=dy.device)
        dw = dw.index_add(0, ids.reshape(-1), (dy * trains).reshape(-1, leaf.shape[1]))
    else:
        torch.ops.odc.embedding_grad(dy, ids, handle, ctx.padding_idx, ctx.choice)
    return None, dw, None, None, None


_embedding.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("odc::embedding_grad", mutates_args=("handle",))
def _embedding_grad(
    dy: torch.Tensor, ids: torch.Tensor, handle: torch.Tensor, padding_idx: int | None, choice: str
) -> None:
    w = resolve(handle)
    if not w.wants_gradient():
        return
    how = chosen("embedding", w, ids.numel(), ids.device, choice)
    flat, dy = ids.reshape(-1).contiguous(), dy.reshape(-1, dy.shape[-1]).contiguous()
    if how.wgrad == "whole":
        dw = torch.ops.aten.embedding_dense_backward(
            dy, flat, w.shape[0], -1 if padding_idx is None else padding_idx, False
        )
        w.add_gradient(dw)
        return
    sink = w.open_sink()
    if isinstance(sink, PeerShards):  # plain torch can't add there while other ranks do
        from odc_kernels.embedding import embedding_grad as add_by_kernel

        add_by_kernel(dy=dy, ids=flat, weight=sink, padding_idx=padding_idx)
        return
    if padding_idx is not None:
        trains = flat != padding_idx
        flat, dy = flat[trains], dy[trains]
    rows, place = flat.unique(return_inverse=True)  # sorted, so owner by owner
    sums = torch.zeros(len(rows), dy.shape[1], dtype=torch.promote_types(dy.dtype, torch.float32), device=dy.device)
    sums.index_add_(0, place, dy.to(sums.dtype))
    ends = torch.tensor([w.first_row(owner) for owner in range(w.world + 1)], device=rows.device)
    bounds = torch.searchsorted(rows, ends.to(rows.dtype)).tolist()
    for owner in w.owners_from_own():
        begin, end = bounds[owner], bounds[owner + 1]
        if begin < end:
            sink(owner, rows[begin:end] - w.first_row(owner), sums[begin:end])


@_embedding_grad.register_fake
def _(*_: Any) -> None:
    return None
