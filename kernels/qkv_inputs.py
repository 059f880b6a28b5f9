"""Inputs of the q, k, v kernels (qkv.py, qkv_grad.py), and their checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .peers import PeerShards, check_bias

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvWeights:
    """The weights of a layer: wq [Hq D, K], wk and wv [Hkv D, K]; biases [Hq D], [Hkv D], [Hkv D]: all three or none.

    Raises ValueError if shapes, dtypes, devices, worlds or ranks don't match.
    """

    wq: PeerShards
    wk: PeerShards
    wv: PeerShards
    bq: PeerShards | None = None
    bk: PeerShards | None = None
    bv: PeerShards | None = None

    def __post_init__(self) -> None:
        for name, weight in (("wq", self.wq), ("wk", self.wk), ("wv", self.wv)):
            if len(weight.shape) != 2 or 0 in weight.shape:
                raise ValueError(f"{name} is {weight.shape}; give two dimensions [heads x head_dim, K], none of them 0")
            want = (self.wq.shape[1], self.wq.dtype, self.wq.world, self.wq.rank, self.wq.device)
            have = (weight.shape[1], weight.dtype, weight.world, weight.rank, weight.device)
            for what, wanted, given in zip(("columns", "dtype", "world", "rank", "device"), want, have, strict=True):
                if wanted != given:
                    raise ValueError(f"{name} has {what} {given} and wq {wanted}; all three must agree")
        if self.wk.shape != self.wv.shape:
            raise ValueError(f"wk is {self.wk.shape} and wv {self.wv.shape}; k and v need as many heads")
        given = [bias is not None for bias in (self.bq, self.bk, self.bv)]
        if any(given) and not all(given):
            raise ValueError(f"only some of bq, bk, bv are given ({given}); give all three (zeros will do) or none")
        if self.bq is not None:
            for bias, weight in ((self.bq, self.wq), (self.bk, self.wk), (self.bv, self.wv)):
                check_bias(bias, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """RMSNorm over each head of q and of k, between bias and RoPE (Qwen3): weights [D], local tensors."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float

    def __post_init__(self) -> None:
        for name, weight in (("q_weight", self.q_weight), ("k_weight", self.k_weight)):
            if weight.ndim != 1 or not weight.is_contiguous() or weight.dtype not in _DTYPES:
                raise ValueError(
                    f"{name} is {tuple(weight.shape)} of {weight.dtype}, strides {weight.stride()}; give a contiguous "
                    f"[head_dim] of float32, bfloat16 or float16"
                )
        if not self.eps > 0:
            raise ValueError(f"eps is {self.eps}; a head of zeros needs it above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Tables cos, sin [P, D] as transformers' rotary embeddings make them, and the tokens' rows in them.

    Only the first of the tables' equal halves is read. `positions`: int64 [T], from 0 in each packed sequence; one
    outside 0..P-1 makes its token's q and k NaN (a check on the host would wait for the device). A model's
    `position_embeddings` are already the tables' rows: then `positions` counts from 0 to T-1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor

    def __post_init__(self) -> None:
        cos, sin, positions = self.cos, self.sin, self.positions
        if cos.ndim != 2 or cos.shape != sin.shape:
            raise ValueError(f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}; give both as [P, head_dim]")
        if cos.dtype != sin.dtype or cos.dtype not in _DTYPES:
            raise ValueError(f"cos is {cos.dtype} and sin {sin.dtype}; give both in float32, bfloat16 or float16")
        if positions.dtype != torch.int64 or positions.ndim != 1:
            raise ValueError(f"positions are {tuple(positions.shape)} of {positions.dtype}; give [T] of int64")
        for name, value in (("cos", cos), ("sin", sin), ("positions", positions)):
            if not value.is_contiguous():
                raise ValueError(f"{name} has strides {value.stride()}; it must be contiguous")


def check_qkv(
    x: torch.Tensor,
    weights: QkvWeights,
    rope: Rope,
    norm: QkNorm | None,
    heads: dict[str, torch.Tensor],
    saved: dict[str, torch.Tensor | None],
) -> None:
    """Raises ValueError unless x, three head tensors (q, k, v or their gradients) and the saved tensors match."""
    columns = weights.wq.shape[1]
    if x.ndim != 2 or x.shape[1] != columns:
        raise ValueError(f"x is {tuple(x.shape)}; with weights of {columns} columns give [T, {columns}]")
    if x.dtype != weights.wq.dtype or x.dtype not in _DTYPES:
        raise ValueError(
            f"x is {x.dtype} and the weights {weights.wq.dtype}; give both in one of float32, bfloat16 or float16"
        )
    (first_name, first), *_ = heads.items()
    if first.ndim != 3:
        raise ValueError(f"{first_name} is {tuple(first.shape)}; give [T, heads, head_dim]")
    head_dim = first.shape[2]
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"head_dim is {head_dim}; this kernel takes 16, 32, 64, 128 or 256: leave this layer as it is (fully_shard "
            f"gathers its weights whole) instead of replacing it"
        )
    for (name, value), weight in zip(heads.items(), (weights.wq, weights.wk, weights.wv), strict=True):
        want = (x.shape[0], weight.shape[0] // head_dim, head_dim)
        if weight.shape[0] % head_dim:
            raise ValueError(f"a weight has {weight.shape[0]} rows, which are not whole heads of {head_dim}")
        if tuple(value.shape) != want:
            raise ValueError(f"{name} is {tuple(value.shape)}; give {want}")
    if (norm is None and any(value is not None for value in saved.values())) or (
        len({value is None for value in saved.values()}) > 1
    ):
        raise ValueError(f"{' and '.join(saved)} go together, and with a norm only; give both or none")
    for (name, value), like in zip(saved.items(), heads.values(), strict=False):
        if value is not None and value.shape != like.shape:
            raise ValueError(f"{name} is {tuple(value.shape)}; give {tuple(like.shape)}")
    given = {"x": x, **heads, **{name: value for name, value in saved.items() if value is not None}}
    for name, value in given.items():
        if value.dtype != x.dtype:
            raise ValueError(f"{name} is {value.dtype}; x and the weights are {x.dtype}")
        if not value.is_contiguous():
            raise ValueError(f"{name} has strides {value.stride()}; it must be contiguous")
    if rope.cos.shape[1] < head_dim:
        raise ValueError(
            f"cos has {rope.cos.shape[1]} columns and head_dim is {head_dim}: a partial rotary embedding, which this "
            f"kernel doesn't have; leave this layer as it is instead of replacing it"
        )
    if rope.cos.shape[1] != head_dim:
        raise ValueError(f"cos is {tuple(rope.cos.shape)}; give [P, {head_dim}]")
    if rope.positions.shape != x.shape[:1]:
        raise ValueError(f"positions are {tuple(rope.positions.shape)}; give [{x.shape[0]}], one per token of x")
    given |= {"cos": rope.cos, "sin": rope.sin, "positions": rope.positions}
    if norm is not None:
        for name, value in (("q_weight", norm.q_weight), ("k_weight", norm.k_weight)):
            if value.shape != (head_dim,):
                raise ValueError(f"{name} is {tuple(value.shape)}; give [{head_dim}], one per element of a head")
            given[name] = value
    for name, value in given.items():
        if value.device != weights.wq.device:
            raise ValueError(f"{name} is on {value.device} and the weights' tables on {weights.wq.device}")
